import { connect } from './channel.js';
import type { Channel, Connect } from './channel.js';
import { ControllerError } from './errors.js';
import { patientFetch } from './patient.js';

const NDJSON = 'application/x-ndjson';
const GRACE_MS = 10_000;
const LONGEST_MS = 2 ** 31 - 1; // of a timer

export interface ControllerOptions {
  /** Where the daemon is; `FORKD_URL`, or http://127.0.0.1:8889. */
  baseUrl?: string;
  /** Its token; `FORKD_TOKEN`, or none. */
  token?: string;
  /** How long an ordinary answer may take; Infinity: as long as it likes. Commands may take their own time limit. */
  timeoutMs?: number;
  /** Another `fetch`. */
  fetch?: typeof fetch;
  /** Another way to open WebSockets. */
  connect?: Connect;
}

export interface Call {
  body?: unknown;
  query?: Record<string, string | number | boolean | string[] | undefined>;
  headers?: Record<string, string>;
  raw?: BodyInit;
  /** Seconds the daemon itself may take. */
  lasts?: number;
  signal?: AbortSignal | undefined;
}

export type Event = { event: string } & Record<string, unknown>;

/** Requests to one daemon: JSON, bytes and streams of events, every refusal a ControllerError. */
export class Http {
  readonly baseUrl: string;
  readonly token: string | undefined;
  readonly timeoutMs: number;
  private readonly fetcher: typeof fetch;
  private readonly connector: Connect;

  constructor(options: ControllerOptions = {}) {
    const env = typeof process === 'undefined' ? {} : process.env;
    this.baseUrl = (options.baseUrl || env['FORKD_URL'] || 'http://127.0.0.1:8889').replace(/\/+$/, '');
    this.token = options.token ?? env['FORKD_TOKEN'];
    this.timeoutMs = options.timeoutMs ?? 60_000;
    this.fetcher = options.fetch ?? patientFetch;
    this.connector = options.connect ?? connect;
  }

  /** A path's part, whatever it contains. */
  static part(text: string | number): string {
    return encodeURIComponent(String(text));
  }

  async json<T>(method: string, path: string, call: Call = {}): Promise<T> {
    const text = await this.exchange(method, path, call, (response) => response.text());
    return (text === '' ? undefined : JSON.parse(text)) as T;
  }

  /** The answer's bytes. */
  async bytes(method: string, path: string, call: Call = {}, limited = false): Promise<Uint8Array> {
    return new Uint8Array(await this.exchange(method, path, call, (response) => response.arrayBuffer(), limited));
  }

  /** The answer's body is the caller's to read. */
  async send(method: string, path: string, call: Call = {}): Promise<Response> {
    return this.exchange(method, path, call, async (response) => response, false);
  }

  /** Send, and `take` the answer. What breaks on the way is a ControllerError; what `call.signal` ends, its reason. */
  private async exchange<T>(
    method: string,
    path: string,
    call: Call,
    take: (response: Response) => Promise<T>,
    limited = true,
  ): Promise<T> {
    const url = this.address(path, call.query);
    const headers: Record<string, string> = { ...call.headers, ...this.login() };
    const init: RequestInit & { duplex?: 'half' } = { method, headers };
    if (call.raw !== undefined) {
      init.body = call.raw;
      init.duplex = 'half';
    } else if (call.body !== undefined) {
      headers['content-type'] = 'application/json';
      init.body = JSON.stringify(call.body);
    }
    const alarm = new AbortController();
    const limit = Math.max(this.timeoutMs, call.lasts === undefined ? 0 : call.lasts * 1000 + GRACE_MS);
    const timer = limited && limit <= LONGEST_MS ? setTimeout(() => alarm.abort(), limit) : undefined;
    const leave = () => alarm.abort(call.signal?.reason);
    if (call.signal?.aborted) leave();
    call.signal?.addEventListener('abort', leave, { once: true });
    init.signal = alarm.signal;
    try {
      const response = await this.fetcher(url, init);
      if (response.status === 207 || !response.ok) throw await refusal(response, url.toString());
      return await take(response);
    } catch (error) {
      if (error instanceof ControllerError || call.signal?.aborted) throw error;
      throw unreachable(error, this.baseUrl, alarm.signal.aborted);
    } finally {
      clearTimeout(timer);
      call.signal?.removeEventListener('abort', leave); // a signal may outlive thousands of calls
    }
  }

  /** A WebSocket. */
  channel(path: string, query?: Call['query']): Promise<Channel> {
    return this.connector('GET', this.address(path, query), this.login());
  }

  private address(path: string, query: Call['query'] = {}): URL {
    const url = new URL(this.baseUrl + path);
    for (const [name, value] of Object.entries(query)) {
      for (const each of Array.isArray(value) ? value : [value]) {
        if (each !== undefined) url.searchParams.append(name, String(each));
      }
    }
    return url;
  }

  private login(): Record<string, string> {
    return this.token ? { authorization: `Bearer ${this.token}` } : {};
  }

  /** Read a stream of events to its end; the result is what the last one carries. */
  async events<T>(method: string, path: string, call: Call, onEvent: (event: Event) => void): Promise<T> {
    const headers = { ...call.headers, accept: NDJSON };
    let last: Event | undefined;
    let thrown: { error: unknown } | undefined;
    const read = async (response: Response): Promise<void> => {
      for await (const line of lines(response)) {
        const event = JSON.parse(line) as Event;
        if (event.event === 'result' || event.event === 'error') last = event;
        else {
          try {
            onEvent(event);
          } catch (error) {
            thrown = { error }; // the listener's own: not a fault of the connection
            return;
          }
        }
      }
    };
    await this.exchange(method, path, { ...call, headers }, read, false);
    if (thrown) throw thrown.error;
    if (last?.event === 'result') return last['result'] as T;
    const failed = last ?? { status: 502, error: 'the answer ended early', code: 'transfer_error' };
    throw new ControllerError(Number((failed as { status?: number }).status ?? 500), failed, this.baseUrl + path);
  }
}

async function* lines(response: Response): AsyncGenerator<string> {
  if (!response.body) return;
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const whole = rest.split('\n');
      rest = done ? '' : (whole.pop() ?? '');
      for (const line of whole) if (line.trim() !== '') yield line;
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

async function refusal(response: Response, url: string): Promise<ControllerError> {
  const text = await response.text();
  try {
    return new ControllerError(response.status, JSON.parse(text), url);
  } catch {
    return new ControllerError(response.status, text, url);
  }
}

function unreachable(error: unknown, url: string, late: boolean): ControllerError {
  const cause = error instanceof Error ? (error.cause instanceof Error ? error.cause.message : error.message) : error;
  const words = late ? `${url} did not answer in time` : `${url} cannot be reached: ${cause}`;
  const hint = 'is it running? start it with: forkd daemon';
  return new ControllerError(late ? 504 : 503, { error: words, code: 'daemon_unreachable', hint }, url);
}

/** Bytes of a base64 text. */
export function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
