import { randomBytes } from 'node:crypto';
import { request as requestHttp } from 'node:http';
import type { IncomingMessage } from 'node:http';
import { request as requestHttps } from 'node:https';
import type { Duplex } from 'node:stream';

import { ControllerError } from './errors.js';

const TEXT = 1;
const BINARY = 2;
const CLOSE = 8;
const PING = 9;
const PONG = 10;
const LIMIT = 64 << 20;
const GOODBYE_MS = 5_000;

export type Message = string | Uint8Array;
export type Connect = (method: string, url: URL, headers: Record<string, string>) => Promise<Channel>;

/** A WebSocket: messages both ways, text and bytes; iterate to receive. Node 18 has none of its own. */
export class Channel implements AsyncIterable<Message> {
  private closed = false;

  constructor(
    private readonly socket: Duplex,
    private rest: Buffer,
  ) {
    socket.on('error', () => socket.destroy());
  }

  /** Send one message; resolves when the connection has taken it. */
  send(message: Message): Promise<void> {
    const text = typeof message === 'string';
    return this.write(text ? TEXT : BINARY, Buffer.from(message as string));
  }

  /** End it from this side. */
  close(): void {
    if (!this.closed) {
      this.closed = true;
      this.write(CLOSE, Buffer.from([0x03, 0xe8])).catch(() => undefined);
      this.socket.end();
      this.socket.removeAllListeners('readable');
      this.socket.resume(); // what still comes is dropped; unread, it would hide the other end's goodbye for ever
      setTimeout(() => this.socket.destroy(), GOODBYE_MS).unref();
    }
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Message> {
    let parts: Buffer[] = [];
    let kind = 0;
    try {
      for await (const frame of this.frames()) {
        if (frame.kind === CLOSE) return;
        if (frame.kind === PING) await this.write(PONG, frame.data);
        if (frame.kind > BINARY) continue;
        kind = frame.kind || kind;
        parts.push(frame.data);
        if (frame.last) {
          const whole = Buffer.concat(parts);
          parts = [];
          yield kind === TEXT ? whole.toString('utf8') : new Uint8Array(whole);
        }
      }
    } finally {
      this.close();
    }
  }

  private async *frames(): AsyncGenerator<{ kind: number; last: boolean; data: Buffer }> {
    const source = this.socket[Symbol.asyncIterator]();
    const need = async (count: number): Promise<boolean> => {
      while (this.rest.length < count) {
        const { done, value } = await source.next();
        if (done) return false;
        this.rest = Buffer.concat([this.rest, value as Buffer]);
      }
      return true;
    };
    while (await need(2)) {
      const first = this.rest.readUInt8(0);
      let length = this.rest.readUInt8(1) & 0x7f;
      const head = length === 126 ? 4 : length === 127 ? 10 : 2;
      if (!(await need(head))) return;
      if (head === 4) length = this.rest.readUInt16BE(2);
      if (head === 10) length = Number(this.rest.readBigUInt64BE(2));
      if (length > LIMIT) throw new Error(`a message of ${length} bytes is too long`);
      if (!(await need(head + length))) return;
      const data = this.rest.subarray(head, head + length);
      this.rest = this.rest.subarray(head + length);
      yield { kind: first & 0x0f, last: (first & 0x80) !== 0, data };
    }
  }

  private write(kind: number, data: Buffer): Promise<void> {
    const head = Buffer.alloc(data.length < 126 ? 2 : data.length < 65536 ? 4 : 10);
    head.writeUInt8(0x80 | kind, 0);
    head.writeUInt8(0x80 | (head.length === 2 ? data.length : head.length === 4 ? 126 : 127), 1);
    if (head.length === 4) head.writeUInt16BE(data.length, 2);
    if (head.length === 10) head.writeBigUInt64BE(BigInt(data.length), 2);
    const mask = randomBytes(4);
    const masked = Buffer.from(data);
    for (let index = 0; index < masked.length; index++) masked[index]! ^= mask[index & 3]!;
    return new Promise((resolve, reject) => {
      this.socket.write(Buffer.concat([head, mask, masked]), (error) => (error ? reject(error) : resolve()));
    });
  }
}

/** Open a WebSocket; a refusal is a ControllerError like any other. */
export const connect: Connect = (method, url, headers) =>
  new Promise((resolve, reject) => {
    const key = randomBytes(16).toString('base64');
    const upgrade = { connection: 'Upgrade', upgrade: 'websocket', 'sec-websocket-version': '13', 'sec-websocket-key': key };
    const open = url.protocol === 'https:' ? requestHttps : requestHttp;
    // A connection of its own: one that was to be upgraded and was refused serves nothing else.
    const request = open(url, { method, headers: { ...headers, ...upgrade }, agent: false });
    request.on('upgrade', (_: IncomingMessage, socket: Duplex, head: Buffer) => resolve(new Channel(socket, head)));
    request.on('response', (response) => {
      const parts: Buffer[] = [];
      response.on('data', (data: Buffer) => parts.push(data));
      response.on('end', () => {
        const text = Buffer.concat(parts).toString('utf8');
        let told: unknown = text;
        try {
          told = JSON.parse(text);
        } catch {
          // not JSON: told as it is
        }
        reject(new ControllerError(response.statusCode ?? 500, told, url.toString()));
      });
    });
    request.on('error', (error) => {
      const told = { error: `${url.origin} cannot be reached: ${error.message}`, code: 'daemon_unreachable' };
      reject(new ControllerError(503, told, url.toString()));
    });
    request.end();
  });
