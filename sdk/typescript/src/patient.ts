import { request as requestHttp } from 'node:http';
import type { IncomingMessage } from 'node:http';
import { request as requestHttps } from 'node:https';
import { Readable } from 'node:stream';
import type { ReadableStream as WebStream } from 'node:stream/web';

const WITHOUT_BODY = [204, 205, 304];

/** `fetch` as far as it is used here. Node's own gives up on an answer that is silent for five minutes; a command may be. */
export const patientFetch = (async (input: URL, init: RequestInit = {}): Promise<Response> => {
  const { signal, body } = init;
  signal?.throwIfAborted();
  const headers = init.headers as Record<string, string>;
  const open = input.protocol === 'https:' ? requestHttps : requestHttp;
  return new Promise((resolve, reject) => {
    const request = open(input, { method: init.method ?? 'GET', headers });
    let answer: IncomingMessage | undefined;
    const leave = () => {
      answer?.destroy(signal?.reason as Error);
      request.destroy(signal?.reason as Error);
    };
    signal?.addEventListener('abort', leave, { once: true });
    request.on('close', () => signal?.removeEventListener('abort', leave));
    request.on('error', reject);
    request.on('response', (incoming) => {
      answer = incoming;
      const status = incoming.statusCode ?? 500;
      const plain = Object.entries(incoming.headers).map(([name, value]) => [name, String(value)] as [string, string]);
      if (WITHOUT_BODY.includes(status)) incoming.resume();
      const stream = WITHOUT_BODY.includes(status) ? null : (Readable.toWeb(incoming) as unknown as ReadableStream);
      resolve(new Response(stream, { status, headers: plain }));
    });
    if (body === undefined || body === null) request.end();
    else if (typeof body === 'string' || body instanceof Uint8Array) request.end(body);
    else {
      const source = Readable.fromWeb(new Response(body).body as unknown as WebStream);
      source.on('error', (error) => request.destroy(error));
      request.on('close', () => source.destroy());
      source.pipe(request);
    }
  });
}) as unknown as typeof fetch;
