import { Controller } from './controller.js';
import type { BranchOptions, EvalOptions, ExecOptions, SpawnOptions } from './controller.js';
import { ControllerError } from './errors.js';
import type { ControllerOptions } from './http.js';
import type { FanoutOptions, ForkRequestOptions } from './lifecycle.js';
import type { Json, OnOutput } from './methods.js';
import type * as api from './schema.js';

export type CreateOptions = Omit<SpawnOptions, 'n'> & ControllerOptions & { controller?: Controller };

/** One sandbox as an object. */
export class Sandbox {
  constructor(
    readonly controller: Controller,
    public info: api.SandboxInfo,
  ) {}

  /** A fresh child of `snapshotTag`. */
  static async create(options: CreateOptions): Promise<Sandbox> {
    const { controller, baseUrl, token, timeoutMs, fetch, connect, ...spawn } = options;
    const given = Object.fromEntries(
      Object.entries({ baseUrl, token, timeoutMs, fetch, connect }).filter(([, value]) => value !== undefined),
    ) as ControllerOptions;
    const used = controller ?? new Controller(given);
    const [info] = await used.spawnSandboxes({ ...spawn, n: 1 });
    if (!info) throw new Error('the daemon answered with no sandbox');
    return new Sandbox(used, info);
  }

  /** One that runs already. */
  static async connect(id: string, controller = new Controller()): Promise<Sandbox> {
    return new Sandbox(controller, await controller.getSandbox(id));
  }

  /** Work with a fresh sandbox that ends when `work` does, however it does. */
  static async with<T>(options: CreateOptions, work: (sandbox: Sandbox) => Promise<T>): Promise<T> {
    const sandbox = await Sandbox.create(options);
    try {
      return await work(sandbox);
    } finally {
      await sandbox.kill();
    }
  }

  get id(): string {
    return this.info.id;
  }

  /** Run a command to its end: a string in a shell, a list as it is. */
  exec(command: string | string[], options: ExecOptions = {}): Promise<api.ExecResult> {
    return this.controller.execCommand(this.id, argv(command), options);
  }

  /** Run a command; `onOutput` gets its output as it comes. */
  stream(command: string | string[], onOutput: OnOutput, options: ExecOptions = {}): Promise<api.ExecResult> {
    return this.controller.execStream(this.id, argv(command), onOutput, options);
  }

  /** Evaluate code in the warm interpreter: Python's repr, or the value itself for other languages. Throws its error. */
  async eval(code: string, options: EvalOptions = {}): Promise<unknown> {
    const answer = await this.controller.evalCode(this.id, code, options);
    if (answer.error !== null) throw new Error(`forkd eval: ${answer.error}`);
    return answer.result ?? answer.result_json ?? null;
  }

  ping(): Promise<Json> {
    return this.controller.pingSandbox(this.id);
  }

  /** Fork it: `n` children that go on from this very instant, and live on when it ends. */
  async fork(n = 1, options: ForkRequestOptions = {}): Promise<Sandbox[]> {
    const rows = await this.controller.fork(this.id, n, options);
    return rows.map((row) => new Sandbox(this.controller, row));
  }

  /** Go back to one of its snapshots; id, name and details stay. */
  async rollback(tag: string): Promise<void> {
    this.info = await this.controller.rollback(this.id, tag);
  }

  /** Take over the id and name of the sandbox this one was forked from, which ends. */
  async promote(): Promise<void> {
    this.info = await this.controller.promote(this.id);
  }

  /** Files, processes, ports and memory by which it differs from a sandbox or a snapshot; its own if not given. */
  diff(against?: Sandbox | string): Promise<api.SandboxDiff> {
    return this.controller.diffSandbox(this.id, against instanceof Sandbox ? against.id : against);
  }

  /** Run a command in `n` forks and end all but the best; rows, the best first. */
  fanout(command: string | string[], n: number, options: FanoutOptions = {}): Promise<api.FanoutRow[]> {
    return this.controller.fanout(this.id, n, argv(command), options);
  }

  /** Capture it into a new snapshot while it goes on. */
  branch(options: BranchOptions = {}): Promise<api.SnapshotInfo> {
    return this.controller.branchSandbox(this.id, options);
  }

  /** End it; harmless if it has ended. */
  async kill(): Promise<void> {
    try {
      await this.controller.killSandbox(this.id);
    } catch (error) {
      if (!(error instanceof ControllerError && error.status === 404)) throw error;
    }
  }
}

function argv(command: string | string[]): string[] {
  return typeof command === 'string' ? ['/bin/sh', '-c', command] : command;
}
