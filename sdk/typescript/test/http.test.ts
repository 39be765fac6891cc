// Against servers that misbehave: what goes wrong on the way is told as it is, and nothing is left behind.
import assert from 'node:assert/strict';
import { getEventListeners, once } from 'node:events';
import { createServer } from 'node:http';
import type { RequestListener } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { test } from 'node:test';

import { Channel, Controller, Sandbox } from '../src/index.js';
import type { ControllerOptions } from '../src/index.js';

async function served(answer: RequestListener, work: (controller: Controller) => Promise<void>, options: ControllerOptions = {}) {
  const server = createServer(answer);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  try {
    await work(new Controller({ baseUrl: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, ...options }));
  } finally {
    server.closeAllConnections();
    server.close();
  }
}

const line = (event: object) => JSON.stringify(event) + '\n';
const output = (text: string) => line({ event: 'stdout', data: Buffer.from(text).toString('base64') });

test('a connection that breaks in the middle of an answer is a ControllerError', async () => {
  const breaking: RequestListener = (request, response) => {
    response.writeHead(200, { 'content-length': '1000' });
    response.write(request.url?.endsWith('/exec') ? output('up') : '{"half":');
    setTimeout(() => request.socket.destroy(), 20);
  };
  await served(breaking, async (controller) => {
    const gone = { name: 'ControllerError', status: 503, code: 'daemon_unreachable' };
    let said = '';
    const running = controller.execStream('sb', ['x'], (_, data) => (said += new TextDecoder().decode(data)));
    await assert.rejects(running, gone);
    assert.equal(said, 'up');
    await assert.rejects(controller.version(), gone);
    await assert.rejects(controller.readFile('sb', '/x'), gone);
    await assert.rejects(controller.writeFile('sb', '/x', 'data'), gone);
  });
});

test('an answer that begins and never ends is late', async () => {
  const stuck: RequestListener = (_, response) => {
    response.write('{"half":');
  };
  await served(stuck, (controller) => assert.rejects(controller.version(), { status: 504 }), { timeoutMs: 50 });
});

test('no time limit is no time limit', async () => {
  const slow: RequestListener = (_, response) => void setTimeout(() => response.end('{"version":"1"}'), 50);
  await served(slow, async (controller) => assert.equal((await controller.version())['version'], '1'), { timeoutMs: Infinity });
});

test('a fan-out may take as long as its commands', async () => {
  const slow: RequestListener = (_, response) => void setTimeout(() => response.end('[]'), 100);
  await served(slow, async (controller) => assert.deepEqual(await controller.fanout('x', 2, ['true']), []), { timeoutMs: 1 });
});

test('a signal used for many calls keeps none of them', async () => {
  const { signal } = new AbortController();
  const fine: RequestListener = (request, response) => {
    response.end(request.headers.accept ? line({ event: 'result', result: { exit_code: 0 } }) : '{"exit_code":0}');
  };
  await served(fine, async (controller) => {
    for (let count = 0; count < 20; count++) {
      await controller.execCommand('sb', ['true'], { signal });
      await controller.execStream('sb', ['true'], () => undefined, { signal });
    }
    assert.equal(getEventListeners(signal, 'abort').length, 0);
  });
});

test('what a listener throws comes out as it is, and ends the request', async () => {
  let ended: () => void = () => undefined;
  const left = new Promise<void>((resolve) => (ended = resolve));
  const endless: RequestListener = (_, response) => {
    response.write(output('one'));
    response.on('close', ended);
  };
  await served(endless, async (controller) => {
    const listener = () => {
      throw new RangeError('mine');
    };
    await assert.rejects(controller.execStream('sb', ['x'], listener), { name: 'RangeError', message: 'mine' });
    await left;
  });
});

test('an aborted call rejects with the reason, before, during and after the headers', async () => {
  const silent: RequestListener = (request, response) => {
    if (request.url?.endsWith('/exec')) response.write(output('up'));
  };
  await served(silent, async (controller) => {
    const why = new Error('changed my mind');
    await assert.rejects(controller.evalCode('sb', '1', { signal: AbortSignal.abort(why) }), why);
    const during = new AbortController();
    setTimeout(() => during.abort(why), 20);
    await assert.rejects(controller.evalCode('sb', '1', { signal: during.signal }), why);
    const after = new AbortController();
    await assert.rejects(
      controller.execStream('sb', ['x'], () => after.abort(why), { signal: after.signal }),
      why,
    );
  });
});

test('bodies arrive whole, of text, of bytes and of a stream', async () => {
  const echo: RequestListener = (request, response) => void request.pipe(response);
  await served(echo, async (controller) => {
    const entry = '{"name":"é"}';
    const bytes = new TextEncoder().encode(entry);
    const stream = new ReadableStream<Uint8Array>({
      start(out) {
        for (const byte of bytes) out.enqueue(Uint8Array.of(byte));
        out.close();
      },
    });
    for (const data of [entry, bytes, stream]) {
      assert.equal((await controller.writeFile('sb', '/x', data)).name, 'é');
    }
  });
});

test('an empty FORKD_URL is none', () => {
  const before = process.env['FORKD_URL'];
  process.env['FORKD_URL'] = '';
  assert.equal(new Controller().baseUrl, 'http://127.0.0.1:8889');
  if (before === undefined) delete process.env['FORKD_URL'];
  else process.env['FORKD_URL'] = before;
});

test('Sandbox.create opens WebSockets in the way it is told', async () => {
  const opened: string[] = [];
  const connect = async (_: string, url: URL): Promise<Channel> => {
    opened.push(url.pathname);
    throw new Error('told');
  };
  const spawning: RequestListener = (_, response) => void response.end('[{"id":"sb"}]');
  await served(spawning, async ({ baseUrl }) => {
    const sandbox = await Sandbox.create({ snapshotTag: 'x', baseUrl, connect });
    await assert.rejects(sandbox.controller.connectPort('sb', 80), /told/);
    assert.deepEqual(opened, ['/v1/sandboxes/sb/tcp/80']);
  });
});

test('a channel that is left lets its connection go, however much comes', async () => {
  let socket: Socket | undefined;
  const server = createServer();
  server.on('upgrade', (_, raw: Socket) => {
    socket = raw;
    raw.on('error', () => undefined);
    raw.write('HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n');
    const frame = Buffer.concat([Buffer.from([0x82, 126, 0xff, 0xff]), Buffer.alloc(65535)]);
    const flood = () => {
      while (!raw.destroyed && raw.write(frame));
    };
    raw.on('drain', flood);
    raw.once('data', () => raw.destroySoon());
    flood();
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const controller = new Controller({ baseUrl: `http://127.0.0.1:${(server.address() as AddressInfo).port}` });
  for await (const message of await controller.connectPort('sb', 80)) {
    assert.equal(message.length, 65535);
    break;
  }
  await once(server.close(), 'close');
  assert.ok(socket?.destroyed);
});
