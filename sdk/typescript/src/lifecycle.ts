import { fromBase64 } from './http.js';
import { ProcessMethods } from './processes.js';
import { sandboxPath } from './methods.js';
import type { Json } from './methods.js';
import { body } from './options.js';
import type { Options } from './options.js';
import type * as api from './schema.js';

export type FanoutOptions = Options<api.FanoutRequest, 'source' | 'n' | 'args'>;
export type ForkRequestOptions = Options<api.ForkRequest, 'source' | 'n'>;

const FANOUT_SECONDS = 30;

/** The one fork verb, pausing, going back, taking over, and what happens. */
export class LifecycleMethods extends ProcessMethods {
  /** Fork a sandbox or a snapshot, in one call; with `onPartial: 'keep'` a 207 carries both lists. */
  fork(source: string, n = 1, options: ForkRequestOptions = {}): Promise<api.SandboxInfo[]> {
    return this.http.json('POST', '/v1/fork', { body: { source, n, ...body(options) } });
  }

  pauseSandbox(id: string): Promise<api.SandboxInfo> {
    return this.http.json('POST', sandboxPath(id, '/pause'));
  }

  resumeSandbox(id: string): Promise<api.SandboxInfo> {
    return this.http.json('POST', sandboxPath(id, '/resume'));
  }

  /** Go back to one of its snapshots, under the same id. */
  rollback(id: string, tag: string): Promise<api.SandboxInfo> {
    return this.http.json('POST', sandboxPath(id, '/rollback'), { body: { tag } });
  }

  /** A child takes over its source's place. */
  promote(id: string): Promise<api.SandboxInfo> {
    return this.http.json('POST', sandboxPath(id, '/promote'));
  }

  /** How a sandbox or a snapshot differs from another one; if not given, from the snapshot it came from. */
  diffSandbox(id: string, against?: string): Promise<api.SandboxDiff> {
    return this.http.json('GET', sandboxPath(id, '/diff'), { query: { against } });
  }

  /** Fork, run a command in each child, end all but the best `keep`; rows, the best first. */
  fanout(source: string, n: number, args: string[], options: FanoutOptions = {}): Promise<api.FanoutRow[]> {
    const lasts = options.timeoutSecs ?? FANOUT_SECONDS;
    return this.http.json('POST', '/v1/fanout', { body: { source, n, args, ...body(options) }, lasts });
  }

  /** What is kept of a log; `source` is console (the guest's kernel and agent) or vmm. */
  sandboxLogs(id: string, source = 'console'): Promise<api.LogText> {
    return this.http.json('GET', sandboxPath(id, '/logs'), { query: { source } });
  }

  /** What is kept of a log, and what comes, until the sandbox or `signal` ends it. */
  async followLogs(
    id: string,
    onData: (data: Uint8Array) => void,
    source = 'console',
    signal?: AbortSignal,
  ): Promise<void> {
    const call = { query: { source, follow: true }, signal };
    await this.http.events('GET', sandboxPath(id, '/logs'), call, (event) => {
      if ('data' in event) onData(fromBase64(String(event['data'])));
    });
  }

  /** Tell `onEvent` what happens in the daemon, until `signal` ends it. */
  async followEvents(
    onEvent: (event: Json) => void,
    options: { since?: number; sandbox?: string; signal?: AbortSignal } = {},
  ): Promise<void> {
    const { signal, ...query } = options;
    await this.http.events('GET', '/v1/events', { query, signal }, onEvent);
  }
}
