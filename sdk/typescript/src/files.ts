import type { Call } from './http.js';
import { Methods, sandboxPath } from './methods.js';
import type * as api from './schema.js';

export type Contents = string | Uint8Array | ReadableStream<Uint8Array>;
export interface WriteOptions {
  mode?: number;
  append?: boolean;
  makeParents?: boolean;
  user?: string;
}
export type OnChange = (change: api.WatchEvent) => void;

const filesPath = (id: string, verb = '') => sandboxPath(id, `/files${verb}`);

/** Files of a sandbox: in pieces, so that any size needs little memory. */
export class FileMethods extends Methods {
  /** Write a file, whole or not at all. */
  writeFile(id: string, path: string, data: Contents, options: WriteOptions = {}): Promise<api.FileEntry> {
    return this.upload(id, path, data, options);
  }

  /** Make a directory of a tar stream. */
  writeTree(id: string, path: string, data: Contents, options: WriteOptions = {}): Promise<api.FileEntry> {
    return this.upload(id, path, data, options, 'tar');
  }

  /** A file's bytes, or a part of them, in memory. */
  async readFile(id: string, path: string, offset = 0, length?: number): Promise<Uint8Array> {
    return this.http.bytes('GET', filesPath(id), part(path, offset, length));
  }

  /** A file's bytes, or a part of them, as they come. */
  async openFile(id: string, path: string, offset = 0, length?: number): Promise<ReadableStream<Uint8Array>> {
    return stream(await this.http.send('GET', filesPath(id), part(path, offset, length)));
  }

  /** A directory as a tar stream. */
  async openTree(id: string, path: string): Promise<ReadableStream<Uint8Array>> {
    return stream(await this.http.send('GET', filesPath(id), { query: { path, format: 'tar' } }));
  }

  statFile(id: string, path: string, follow = false): Promise<api.FileEntry> {
    return this.http.json('GET', filesPath(id, '/stat'), { query: { path, follow: follow || undefined } });
  }

  listFiles(id: string, path: string, depth = 1): Promise<api.FileEntry[]> {
    return this.http.json('GET', filesPath(id, '/list'), { query: { path, depth } });
  }

  makeDirectory(id: string, path: string, mode = 0o755, parents = false): Promise<api.FileEntry> {
    return this.http.json('POST', filesPath(id, '/mkdir'), { body: { path, mode, parents } });
  }

  moveFile(id: string, source: string, target: string): Promise<api.FileEntry> {
    return this.http.json('POST', filesPath(id, '/move'), { body: { source, target } });
  }

  changeMode(id: string, path: string, mode: number): Promise<api.FileEntry> {
    return this.http.json('POST', filesPath(id, '/chmod'), { body: { path, mode } });
  }

  async removeFile(id: string, path: string, recursive = false): Promise<void> {
    await this.http.json('DELETE', filesPath(id), { query: { path, recursive: recursive || undefined } });
  }

  /** Tell `onChange` every change below a directory until it is gone, or `signal` ends it. */
  async watchFiles(
    id: string,
    path: string,
    onChange: OnChange,
    options: { recursive?: boolean; onReady?: () => void; signal?: AbortSignal } = {},
  ): Promise<void> {
    const query = { path, recursive: options.recursive || undefined };
    await this.http.events('GET', filesPath(id, '/watch'), { query, signal: options.signal }, (event) => {
      if (event.event === 'change') onChange(event['change'] as api.WatchEvent);
      else options.onReady?.();
    });
  }

  private async upload(
    id: string,
    path: string,
    data: Contents,
    options: WriteOptions,
    format?: string,
  ): Promise<api.FileEntry> {
    const { mode, append, makeParents, user } = options;
    const query = { path, format, mode, append: append || undefined, make_parents: makeParents || undefined, user };
    const entry = await this.http.bytes('PUT', filesPath(id), { query, raw: data as BodyInit });
    return JSON.parse(new TextDecoder().decode(entry)) as api.FileEntry;
  }
}

/** A file, or a part of it. */
function part(path: string, offset: number, length?: number): Call {
  const headers: Record<string, string> = {};
  if (offset || length !== undefined) {
    headers['range'] = `bytes=${offset}-${length === undefined ? '' : offset + length - 1}`;
  }
  return { query: { path }, headers };
}

function stream(response: Response): ReadableStream<Uint8Array> {
  if (!response.body) throw new Error('the answer has no body');
  return response.body as ReadableStream<Uint8Array>;
}
