import { fromBase64, Http } from './http.js';
import { HubMethods } from './hub.js';
import { sandboxPath } from './methods.js';
import type { Json, OnOutput, OnProgress } from './methods.js';
import { body } from './options.js';
import type { Options } from './options.js';
import type * as api from './schema.js';

export type SpawnOptions = Options<api.CreateSandboxes, 'snapshot_tag'> & { snapshotTag: string };
export type LimitOptions = Options<api.UpdateSandbox>;
export type SnapshotOptions = Options<api.CreateSnapshot, 'tag'> & { tag: string };
export type SnapshotNotes = Options<api.UpdateSnapshot>;
export type RuleOptions = Options<api.RetentionRule>;
export type RootfsOptions = Options<api.BuildRootfs, 'image'> & { image: string };
export type BranchOptions = Options<api.BranchRequest, 'mode'> & { mode?: BranchMode | undefined; measure_diff?: boolean };
export type ExecOptions = Options<api.ExecRequest, 'args'> & { signal?: AbortSignal };
export type EvalOptions = Options<api.EvalRequest, 'code'> & { signal?: AbortSignal };
export type PrepareOptions = Options<api.PrepareRequest>;
export type WorkspaceOptions = Options<api.CreateWorkspace, 'name' | 'snapshot_tag'> & { name: string; snapshotTag: string };
export type BranchMode = 'full' | 'diff' | 'live';
export type ForkOptions = Options<api.ForkSandbox, 'n'>;

const EXEC_SECONDS = 30;
const snapshotPath = (tag: string, verb = '') => `/v1/snapshots/${Http.part(tag)}${verb}`;
const workspacePath = (name: string, verb = '') => `/v1/workspaces/${Http.part(name)}${verb}`;

/** The REST API as methods: the same as Python's `Controller`, in camelCase. */
export class Controller extends HubMethods {
  // -- the host

  /** Version of forkd and of its API. */
  version(): Promise<Json> {
    return this.http.json('GET', '/version');
  }

  /** Plugins and what became of them. */
  listPlugins(): Promise<Json[]> {
    return this.http.json('GET', '/v1/plugins');
  }

  /** Fetch the guest kernel if it is not there, or, with `refresh`, again; `kernel`, a path of the daemon's host, is taken in. */
  setup(onProgress?: OnProgress, kernel?: string, refresh = false): Promise<Json> {
    return this.long('/v1/setup', { kernel, refresh }, onProgress);
  }

  /** Checks of the host, with what to do about those that fail. */
  doctor(): Promise<Json[]> {
    return this.http.json('GET', '/v1/doctor');
  }

  /** What dead processes left; removed if asked. */
  cleanup(remove = false): Promise<Json[]> {
    return this.http.json('POST', '/v1/cleanup', { body: { remove } });
  }

  // -- snapshots

  listSnapshots(): Promise<api.SnapshotInfo[]> {
    return this.http.json('GET', '/v1/snapshots');
  }

  getSnapshot(tag: string): Promise<api.SnapshotInfo> {
    return this.http.json('GET', snapshotPath(tag));
  }

  /** Boot a parent (from `image`, or `rootfs` and `kernel`) and capture it. */
  createSnapshot(options: SnapshotOptions, onProgress?: OnProgress): Promise<api.SnapshotInfo> {
    return this.long('/v1/snapshots', body(options), onProgress);
  }

  /** Lineage and sizes of one snapshot. */
  snapshotInfo(tag: string): Promise<Json> {
    return this.http.json('GET', snapshotPath(tag, '/info'));
  }

  /** Flatten a chain into a new snapshot. */
  compactSnapshot(tag: string, to: string): Promise<api.SnapshotInfo> {
    return this.http.json('POST', snapshotPath(tag, '/compact'), { body: { to } });
  }

  /** Let `size` machines wait, warm, for the snapshot's next children (0: none); resolves when they do. */
  setPool(tag: string, size: number): Promise<api.PoolInfo> {
    return this.http.json('PUT', snapshotPath(tag, '/pool'), { body: { size } });
  }

  async deleteSnapshot(tag: string, options: { cascade?: boolean; force?: boolean } = {}): Promise<void> {
    const query = { cascade: options.cascade || undefined, force: options.force || undefined };
    await this.http.json('DELETE', snapshotPath(tag), { query });
  }

  /** Pin a snapshot, so that it is not removed, or unpin it; give it other labels. */
  updateSnapshot(tag: string, options: SnapshotNotes): Promise<api.SnapshotInfo> {
    return this.http.json('PATCH', snapshotPath(tag), { body: body(options) });
  }

  /** Remove the snapshots that rules let go, or, by default, only say which. */
  pruneSnapshots(rules: RuleOptions[], options: { dryRun?: boolean } = {}): Promise<api.Pruned> {
    const asked = { rules: [...rules].map((rule) => body(rule)), dry_run: options.dryRun ?? true };
    return this.http.json('POST', '/v1/snapshots/prune', { body: asked });
  }

  /** Build a disk from an image. */
  buildRootfs(options: RootfsOptions, onProgress?: OnProgress): Promise<Json> {
    return this.long('/v1/rootfs', body(options), onProgress);
  }

  // -- sandboxes

  /** Fork `n` children, all of them or none; with `partial`, a ControllerError with status 207 carries both lists. */
  spawnSandboxes(options: SpawnOptions): Promise<api.SandboxInfo[]> {
    return this.http.json('POST', '/v1/sandboxes', { body: { n: 1, ...body(options) } });
  }

  /** Fork `n` children of a running sandbox, all from the same instant. */
  forkSandbox(id: string, n = 1, options: ForkOptions = {}): Promise<api.SandboxInfo[]> {
    return this.http.json('POST', sandboxPath(id, '/fork'), { body: { n, ...body(options) } });
  }

  /** All running sandboxes, or those with every label (name=value, or name) and a status. */
  listSandboxes(options: { labels?: string[]; status?: string } = {}): Promise<api.SandboxInfo[]> {
    return this.http.json('GET', '/v1/sandboxes', { query: { label: options.labels, status: options.status } });
  }

  getSandbox(id: string): Promise<api.SandboxInfo> {
    return this.http.json('GET', sandboxPath(id));
  }

  /** Change a running sandbox's limits. */
  updateSandbox(id: string, options: LimitOptions): Promise<api.SandboxInfo> {
    return this.http.json('PATCH', sandboxPath(id), { body: body(options) });
  }

  async killSandbox(id: string): Promise<void> {
    await this.http.json('DELETE', sandboxPath(id));
  }

  /** Capture a running sandbox into a new snapshot. */
  branchSandbox(id: string, options: BranchOptions = {}): Promise<api.SnapshotInfo> {
    return this.http.json('POST', sandboxPath(id, '/branch'), { body: body(options) });
  }

  /** Run a command to its end. */
  execCommand(id: string, args: string[], options: ExecOptions = {}): Promise<api.ExecResult> {
    const { signal, ...fields } = options;
    const lasts = fields.timeoutSecs ?? EXEC_SECONDS;
    return this.http.json('POST', sandboxPath(id, '/exec'), { body: { args, ...body(fields) }, lasts, signal });
  }

  /** Run a command; `onOutput` gets its output as it comes. Aborting ends the command. */
  execStream(id: string, args: string[], onOutput: OnOutput, options: ExecOptions = {}): Promise<api.ExecResult> {
    const { signal, ...fields } = options;
    const call = { body: { args, ...body(fields) }, signal };
    return this.http.events('POST', sandboxPath(id, '/exec'), call, (event) => {
      onOutput(event.event as 'stdout' | 'stderr', fromBase64(String(event['data'])));
    });
  }

  /** Evaluate code in the warm interpreter. */
  evalCode(id: string, code: string, options: EvalOptions = {}): Promise<api.EvalResult> {
    const { signal, ...fields } = options;
    const lasts = fields.timeoutSecs ?? EXEC_SECONDS;
    return this.http.json('POST', sandboxPath(id, '/eval'), { body: { code, ...body(fields) }, lasts, signal });
  }

  /** Change what children of its branches begin with: defaults of commands, a warm runtime. */
  async prepareSandbox(id: string, options: PrepareOptions): Promise<void> {
    const lasts = options.timeoutSecs ?? 60;
    await this.http.json('POST', sandboxPath(id, '/prepare'), { body: body(options), lasts });
  }

  /** Ask the agent in the guest. */
  pingSandbox(id: string): Promise<Json> {
    return this.http.json('POST', sandboxPath(id, '/ping'), { body: {} });
  }

  /** Memory and CPU time a sandbox costs the host. */
  sandboxStats(id: string): Promise<Json> {
    return this.http.json('GET', sandboxPath(id, '/stats'));
  }

  // -- workspaces

  listWorkspaces(): Promise<api.WorkspaceInfo[]> {
    return this.http.json('GET', '/v1/workspaces');
  }

  createWorkspace(options: WorkspaceOptions): Promise<api.WorkspaceInfo> {
    return this.http.json('POST', '/v1/workspaces', { body: body(options) });
  }

  getWorkspace(name: string): Promise<api.WorkspaceInfo> {
    return this.http.json('GET', workspacePath(name));
  }

  suspendWorkspace(name: string, options: { diff?: boolean } = {}): Promise<api.WorkspaceInfo> {
    return this.http.json('POST', workspacePath(name, '/suspend'), { body: body(options) });
  }

  resumeWorkspace(name: string): Promise<api.WorkspaceInfo> {
    return this.http.json('POST', workspacePath(name, '/resume'), { body: {} });
  }

  async deleteWorkspace(name: string): Promise<void> {
    await this.http.json('DELETE', workspacePath(name));
  }

  // -- below

  private long<T>(path: string, fields: object, onProgress?: OnProgress): Promise<T> {
    return this.http.events('POST', path, { body: fields }, (event) => {
      onProgress?.(String(event['step']), event['fraction'] as number | null);
    });
  }
}
