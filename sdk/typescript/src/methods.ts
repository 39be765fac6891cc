import { Http } from './http.js';
import type { ControllerOptions } from './http.js';

export type Json = Record<string, unknown>;
export type OnProgress = (step: string, fraction: number | null) => void;
export type OnOutput = (stream: 'stdout' | 'stderr', data: Uint8Array) => void;

export const sandboxPath = (id: string, verb = '') => `/v1/sandboxes/${Http.part(id)}${verb}`;

/** What all groups of methods share: the way to one daemon. */
export class Methods {
  readonly http: Http;

  constructor(options: ControllerOptions = {}) {
    this.http = new Http(options);
  }

  get baseUrl(): string {
    return this.http.baseUrl;
  }
}
