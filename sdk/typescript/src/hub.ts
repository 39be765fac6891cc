import { LifecycleMethods } from './lifecycle.js';
import { body } from './options.js';
import type { Options } from './options.js';
import type { Json } from './methods.js';
import type * as api from './schema.js';

export type OnTransfer = (event: Json) => void;
export type PackOptions = Options<api.PackRequest, 'tag'>;
export type UnpackOptions = Options<api.UnpackRequest, 'path'>;
export type PushOptions = Options<api.PushRequest, 'tag' | 'target'>;
export type PullOptions = Options<api.PullRequest, 'target'>;
export type LoginOptions = Options<api.HubLogin, 'url'>;

/** Snapshots as packs and in registries. Paths are those of the daemon's host. */
export class HubMethods extends LifecycleMethods {
  pack(tag: string, options: PackOptions = {}, onTransfer?: OnTransfer): Promise<Json> {
    return this.transfer('/v1/hub/pack', { tag, ...body(options) }, onTransfer);
  }

  unpack(path: string, options: UnpackOptions = {}, onTransfer?: OnTransfer): Promise<Json> {
    return this.transfer('/v1/hub/unpack', { path, ...body(options) }, onTransfer);
  }

  /** Send a snapshot to a registry, or as a pack to a URL. */
  push(tag: string, target: string, options: PushOptions = {}, onTransfer?: OnTransfer): Promise<Json> {
    return this.transfer('/v1/hub/push', { tag, target, ...body(options) }, onTransfer);
  }

  /** Fetch a snapshot from a registry, or a pack from a URL. */
  pull(target: string, options: PullOptions = {}, onTransfer?: OnTransfer): Promise<Json> {
    return this.transfer('/v1/hub/pull', { target, ...body(options) }, onTransfer);
  }

  /** What a registry offers, filtered by words. */
  hubPackages(hub?: string, words?: string): Promise<Json[]> {
    return this.http.json('GET', '/v1/hub/packages', { query: { hub, words } });
  }

  /** Whether a package would run on the daemon's host. */
  hubCheck(target: string, hub?: string): Promise<Json> {
    return this.http.json('POST', '/v1/hub/check', { body: { target, hub } });
  }

  /** Keep a login for a registry, or forget it. */
  async hubLogin(url: string, options: LoginOptions = {}): Promise<void> {
    await this.http.json('POST', '/v1/hub/login', { body: { url, ...body(options) } });
  }

  /** Make a signing key; answers its public part. */
  hubKeygen(name = 'default'): Promise<Json> {
    return this.http.json('POST', '/v1/hub/keys', { body: { name } });
  }

  hubSign(path: string, key = 'default'): Promise<Json> {
    return this.http.json('POST', '/v1/hub/sign', { body: { path, key } });
  }

  hubTrusted(): Promise<Json[]> {
    return this.http.json('GET', '/v1/hub/trusted');
  }

  /** Trust a public key under a name; without a key, stop trusting that name. */
  hubTrust(name: string, key?: string): Promise<Json[]> {
    return this.http.json('POST', '/v1/hub/trusted', { body: { name, key } });
  }

  private transfer(path: string, fields: object, onTransfer?: OnTransfer): Promise<Json> {
    return this.http.events('POST', path, { body: fields }, (event) => onTransfer?.(event));
  }
}
