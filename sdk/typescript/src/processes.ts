import type { Channel } from './channel.js';
import { FileMethods } from './files.js';
import { fromBase64, Http } from './http.js';
import { sandboxPath } from './methods.js';
import type { OnOutput } from './methods.js';
import { body } from './options.js';
import type { Options } from './options.js';
import type * as api from './schema.js';

export type ProcessOptions = Options<api.StartProcess>;
export type ProcessId = number | string;
export interface ProcessOutput {
  process: api.ProcessInfo;
  stdout: Uint8Array;
  stderr: Uint8Array;
}

/** How a followed process ended; `lost`: the bytes that were no longer there to be given. */
export type Followed = api.ProcessInfo & { lost: number };

const processPath = (id: string, process: ProcessId, verb = '') =>
  sandboxPath(id, `/processes/${Http.part(process)}${verb}`);

/** Commands that outlive the request that started them, and connections to what they serve. */
export class ProcessMethods extends FileMethods {
  /**
   * Start a command (`args`, or `shell`) and return at once; with `attach` its output is kept for whoever attaches or
   * follows next.
   */
  startProcess(id: string, options: ProcessOptions): Promise<api.ProcessInfo> {
    return this.http.json('POST', sandboxPath(id, '/processes'), { body: body(options) });
  }

  listProcesses(id: string): Promise<api.ProcessInfo[]> {
    return this.http.json('GET', sandboxPath(id, '/processes'));
  }

  /** One process, by pid or tag. */
  getProcess(id: string, process: ProcessId): Promise<api.ProcessInfo> {
    return this.http.json('GET', processPath(id, process));
  }

  /** What is buffered of its output. */
  async processOutput(id: string, process: ProcessId): Promise<ProcessOutput> {
    const answer = await this.http.json<api.ProcessOutput>('GET', processPath(id, process, '/output'));
    const bytes = (text: unknown) => fromBase64(String(text ?? ''));
    return { process: answer.process, stdout: bytes(answer.stdout), stderr: bytes(answer.stderr) };
  }

  /** Its output from `position` on as it comes, until it ends; how it ended. */
  async followProcess(
    id: string,
    process: ProcessId,
    onOutput: OnOutput,
    position = 0,
    signal?: AbortSignal,
  ): Promise<Followed> {
    const call = { query: { from: position }, signal };
    let lost = 0;
    const ended = await this.http.events<api.ProcessInfo>('GET', processPath(id, process, '/output'), call, (event) => {
      if ('data' in event) onOutput(event.event as 'stdout' | 'stderr', fromBase64(String(event['data'])));
      else if (event.event === 'lost') lost += Number(event['count']);
    });
    return { ...ended, lost };
  }

  /** Send input; with `eof` that was all. */
  async sendStdin(id: string, process: ProcessId, data: string | Uint8Array = '', eof = false): Promise<void> {
    const call = { query: { eof: eof || undefined }, raw: data as BodyInit };
    await this.http.bytes('POST', processPath(id, process, '/stdin'), call, true);
  }

  /** Signal its whole group. */
  async signalProcess(id: string, process: ProcessId, signal: number | string = 'TERM'): Promise<void> {
    await this.http.json('POST', processPath(id, process, '/signal'), { body: { signal } });
  }

  /** SIGKILL to its whole group. */
  async killProcess(id: string, process: ProcessId): Promise<void> {
    await this.http.json('DELETE', processPath(id, process));
  }

  async resizeTerminal(id: string, process: ProcessId, rows: number, cols: number): Promise<void> {
    await this.http.json('POST', processPath(id, process, '/resize'), { body: { rows, cols } });
  }

  /** Its output, input and signals on one channel (the messages are in the API's description). */
  attachProcess(id: string, process: ProcessId, position = 0, hangup = false): Promise<Channel> {
    const query = { from: position, hangup: hangup || undefined };
    return this.http.channel(processPath(id, process, '/attach'), query);
  }

  /** A TCP connection to a port in the guest: binary messages both ways. */
  connectPort(id: string, port: number): Promise<Channel> {
    return this.http.channel(sandboxPath(id, `/tcp/${Http.part(port)}`));
  }
}
