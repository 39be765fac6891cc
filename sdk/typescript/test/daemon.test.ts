// Against a real daemon and real machines: FORKD_URL says where, FORKD_TAG which warm Python parent.
import assert from 'node:assert/strict';
import { after, test } from 'node:test';

import { Controller, ControllerError, Sandbox } from '../src/index.js';

const TAG = process.env['FORKD_TAG'] ?? 'python-numpy';
const controller = new Controller();
const made: string[] = [];
const text = (data: Uint8Array) => new TextDecoder().decode(data);

async function child(): Promise<string> {
  const [info] = await controller.spawnSandboxes({ snapshotTag: TAG });
  assert.ok(info);
  return info.id;
}

after(async () => {
  for (const row of await controller.listSandboxes()) await controller.killSandbox(row.id);
  for (const tag of made) await controller.deleteSnapshot(tag, { force: true });
});

test('the daemon says who it is', async () => {
  assert.match(String((await controller.version())['version']), /^\d+\./);
  const row = await controller.getSnapshot(TAG);
  assert.equal(row.bootable, true);
  assert.equal((await controller.snapshotInfo(TAG))['tag'], TAG);
  assert.ok((await controller.listSnapshots()).some((each) => each.tag === TAG));
  assert.ok((await controller.doctor()).length > 0);
  assert.ok((await controller.listPlugins()).length > 0);
  assert.ok(Array.isArray(await controller.cleanup())); // commands of others may run beside us
});

test('children answer, each with its own memory', async () => {
  const children = await controller.spawnSandboxes({ snapshotTag: TAG, n: 3, memoryLimitMib: 1024 });
  await Promise.all(children.map(({ id }, index) => controller.evalCode(id, `x = ${index}`)));
  const answers = await Promise.all(children.map(({ id }) => controller.evalCode(id, 'x, numpy.ones(2).sum()')));
  assert.deepEqual(answers.map((each) => each.result?.[1]), ['0', '1', '2']);
  const [first] = children;
  assert.ok(first);
  assert.equal((await controller.getSandbox(first.id)).memory_limit_mib, 1024);
  assert.equal((await controller.updateSandbox(first.id, { memoryLimitMib: 900 })).memory_limit_mib, 900);
  assert.equal((await controller.pingSandbox(first.id))['pong'], true);
  assert.ok(Number((await controller.sandboxStats(first.id))['pid'] ?? 1) > 0);
});

test('a command ends in the way it ended', async () => {
  const id = await child();
  const done = await controller.execCommand(id, ['sh', '-c', 'cat; echo $WHO >&2; pwd; exit 3'], {
    stdin: 'in\n',
    env: { WHO: 'me' },
    cwd: '/tmp',
  });
  assert.deepEqual([done.stdout, done.stderr, done.exit_code], ['in\n/tmp\n', 'me\n', 3]);
  const late = await controller.execCommand(id, ['sleep', '60'], { timeoutSecs: 0.5 });
  assert.deepEqual([late.exit_code, late.timed_out], [124, true]);
});

test('output comes as it is printed, and bytes stay bytes', async () => {
  const id = await child();
  const pieces: Record<string, string> = { stdout: '', stderr: '' };
  const done = await controller.execStream(id, ['sh', '-c', 'echo a; echo b >&2; echo c'], (stream, data) => {
    pieces[stream] += text(data);
  });
  assert.equal(done.exit_code, 0);
  assert.deepEqual(pieces, { stdout: 'a\nc\n', stderr: 'b\n' });
  const bytes: number[] = [];
  await controller.execStream(id, ['printf', '\\377\\000'], (_, data) => bytes.push(...data));
  assert.deepEqual(bytes, [255, 0]);
});

test('leaving a stream ends the command', async () => {
  const id = await child();
  const leave = new AbortController();
  const running = controller.execStream(id, ['sh', '-c', 'echo up; exec sleep 900'], () => leave.abort(), {
    timeoutSecs: 100,
    signal: leave.signal,
  });
  await assert.rejects(running, { name: 'AbortError' });
  const count = ['sh', '-c', 'cat /proc/[0-9]*/comm | grep -c "^sleep$"; true'];
  for (let left = 1; left > 0; ) left = Number((await controller.execCommand(id, count)).stdout);
});

test('a branch carries the state on, and a grandchild has it', async () => {
  const id = await child();
  await controller.evalCode(id, 'thought = 41');
  const tag = `ts-${process.pid}`;
  made.push(tag);
  const branch = await controller.branchSandbox(id, { tag, mode: 'diff' });
  assert.equal(branch.parent_tag, TAG);
  const grandchild = await Sandbox.create({ snapshotTag: tag, controller });
  assert.equal(await grandchild.eval('thought + 1'), '42');
  const flat = `ts-flat-${process.pid}`;
  made.push(flat);
  assert.equal((await controller.compactSnapshot(tag, flat)).tag, flat);
  await grandchild.kill();
  await grandchild.kill();
});

test('a pinned snapshot stays, and rules say what would go', async () => {
  const tag = `t-ts-kept-${Date.now()}`;
  const [source] = await controller.spawnSandboxes({ snapshotTag: TAG });
  await controller.branchSandbox(source!.id, { tag, mode: 'diff', labels: { kept: tag } });
  assert.equal((await controller.updateSnapshot(tag, { pinned: true })).pinned, true);
  const rule = { labels: [`kept=${tag}`], keepLast: 0 };
  const plan = await controller.pruneSnapshots([rule]);
  assert.deepEqual(plan.rows.filter((row) => row.tag === tag).map((row) => row.reason), ['pinned']);
  await controller.updateSnapshot(tag, { pinned: false });
  const done = await controller.pruneSnapshots([rule], { dryRun: false });
  assert.deepEqual(done.rows.filter((row) => row.action === 'remove').map((row) => row.tag), [tag]);
  await controller.killSandbox(source!.id);
});

test('a sandbox lives as long as the work', async () => {
  let id = '';
  await assert.rejects(
    Sandbox.with({ snapshotTag: TAG }, async (sandbox) => {
      id = sandbox.id;
      assert.equal((await sandbox.exec('echo $((1 + 1))')).stdout, '2\n');
      await sandbox.eval('1/0');
    }),
    /ZeroDivisionError/,
  );
  await assert.rejects(controller.getSandbox(id), { status: 404, code: 'sandbox_not_found' });
});

test('preparing changes what commands begin with', async () => {
  const id = await child();
  await controller.prepareSandbox(id, { env: { WHO: 'prepared' }, workdir: '/tmp' });
  assert.equal((await controller.execCommand(id, ['sh', '-c', 'echo $WHO; pwd'])).stdout, 'prepared\n/tmp\n');
});

test('a workspace comes back as it was', async () => {
  const name = `ts-${process.pid}`;
  const created = await controller.createWorkspace({ name, snapshotTag: TAG });
  try {
    await controller.evalCode(String(created.live_sandbox_id), 'kept = 7');
    assert.equal((await controller.suspendWorkspace(name)).status, 'suspended');
    const back = await controller.resumeWorkspace(name);
    assert.equal((await controller.evalCode(String(back.live_sandbox_id), 'kept')).result, '7');
    assert.ok((await controller.listWorkspaces()).some((each) => each.name === name));
    assert.equal((await controller.getWorkspace(name)).status, 'running');
  } finally {
    await controller.deleteWorkspace(name);
  }
});

test('refusals say what, why and what to do', async () => {
  await assert.rejects(controller.spawnSandboxes({ snapshotTag: 'no-such' }), (error: unknown) => {
    assert.ok(error instanceof ControllerError);
    assert.deepEqual([error.status, error.code], [404, 'snapshot_not_found']);
    assert.match(error.message, /no-such/);
    return true;
  });
  await assert.rejects(controller.getSandbox('a/b?c#d'), { status: 404 });
  await assert.rejects(controller.execCommand('x', []), { name: 'ControllerError' });
  const nobody = new Controller({ baseUrl: 'http://127.0.0.1:1/' });
  await assert.rejects(nobody.version(), { status: 503, code: 'daemon_unreachable' });
  const silent: typeof fetch = (_, init) =>
    new Promise((_resolve, reject) => init?.signal?.addEventListener('abort', () => reject(new Error('aborted'))));
  const slow = new Controller({ fetch: silent, timeoutMs: 1 });
  await assert.rejects(slow.version(), { status: 504 });
});

test('files go in and come out as they are', async () => {
  const id = await child();
  const big = new Uint8Array(3 << 20).map((_, index) => index * 7);
  const entry = await controller.writeFile(id, '/root/a/b/big', big, { makeParents: true, mode: 0o600 });
  assert.deepEqual([entry.size, entry.mode], [big.length, 0o600]);
  assert.deepEqual(await controller.readFile(id, '/root/a/b/big'), big);
  assert.deepEqual(await controller.readFile(id, '/root/a/b/big', 5, 3), big.slice(5, 8));
  await controller.writeFile(id, '/root/a/text', 'one\n');
  await controller.writeFile(id, '/root/a/text', 'two\n', { append: true });
  await controller.moveFile(id, '/root/a/text', '/root/a/text2');
  assert.equal(text(await controller.readFile(id, '/root/a/text2')), 'one\ntwo\n');
  await controller.makeDirectory(id, '/root/a/c');
  await controller.changeMode(id, '/root/a/text2', 0o640);
  assert.equal((await controller.statFile(id, '/root/a/text2')).mode, 0o640);
  const names = (await controller.listFiles(id, '/root/a')).map((each) => each.name);
  assert.deepEqual(names.sort(), ['b', 'c', 'text2']);
  await controller.writeTree(id, '/root/copy', await controller.openTree(id, '/root/a'));
  assert.deepEqual(await controller.readFile(id, '/root/copy/b/big'), big);
  let size = 0;
  for await (const piece of (await controller.openFile(id, '/root/copy/b/big')) as unknown as AsyncIterable<Uint8Array>) {
    size += piece.length;
  }
  assert.equal(size, big.length);
  await controller.removeFile(id, '/root/a', true);
  await assert.rejects(controller.statFile(id, '/root/a'), { status: 404, code: 'guest_file_not_found' });
});

test('changes below a directory are told', async () => {
  const id = await child();
  const leave = new AbortController();
  const seen: string[] = [];
  const watching = controller.watchFiles(
    id,
    '/tmp',
    (change) => {
      seen.push(change.path);
      leave.abort();
    },
    { signal: leave.signal, onReady: () => void controller.writeFile(id, '/tmp/new', 'x') },
  );
  await assert.rejects(watching, { name: 'AbortError' });
  assert.ok(seen.length > 0);
});

test('a process outlives the request, takes input and is ended', async () => {
  const id = await child();
  const started = await controller.startProcess(id, { args: ['cat'], stdin: true, tag: 'cat' });
  let said = '';
  const following = controller.followProcess(id, 'cat', (_, data) => (said += text(data)));
  await controller.sendStdin(id, 'cat', 'hello ');
  await controller.sendStdin(id, started.pid, 'there', true);
  assert.equal((await following).exit_code, 0);
  assert.equal(said, 'hello there');
  assert.equal(text((await controller.processOutput(id, 'cat')).stdout), 'hello there');
  const sleeper = await controller.startProcess(id, { shell: 'sleep 600' });
  assert.ok((await controller.listProcesses(id)).some((each) => each.pid === sleeper.pid));
  await controller.signalProcess(id, sleeper.pid);
  await controller.followProcess(id, sleeper.pid, () => undefined);
  assert.equal((await controller.getProcess(id, sleeper.pid)).running, false);
});

test('a terminal is attached to, resized and left', async () => {
  const id = await child();
  const shell = await controller.startProcess(id, { shell: 'stty size; read x; echo got $x; stty size', pty: { rows: 30, cols: 90 } });
  const channel = await controller.attachProcess(id, shell.pid);
  let said = '';
  for await (const message of channel) {
    if (typeof message === 'string') {
      if ((JSON.parse(message) as { event: string }).event === 'end') break;
      continue;
    }
    const before = said;
    said += text(message.slice(1));
    if (!before.includes('30 90') && said.includes('30 90')) {
      await controller.resizeTerminal(id, shell.pid, 40, 100);
      await channel.send(new TextEncoder().encode('input\n'));
    }
  }
  assert.match(said, /30 90[^]*got input[^]*40 100/);
});

test('a server in the guest is reached over a channel', async () => {
  const id = await child();
  const code = "import socket; s = socket.create_server(('127.0.0.1', 8000)); print('up', flush=True); c, _ = s.accept(); c.sendall(c.recv(100).upper()); c.close()";
  const server = await controller.startProcess(id, { args: ['python3', '-c', code] });
  const leave = new AbortController();
  await controller.followProcess(id, server.pid, () => leave.abort(), 0, leave.signal).catch(() => undefined);
  const channel = await controller.connectPort(id, 8000);
  await channel.send(new TextEncoder().encode('hello'));
  let said = '';
  for await (const message of channel) if (typeof message !== 'string') said += text(message); // texts are events
  assert.equal(said, 'HELLO');
  await assert.rejects(controller.attachProcess(id, 999999), { status: 404 });
  await controller.startProcess(id, { shell: 'sleep 600', tag: 'gone' });
  await controller.killProcess(id, 'gone');
});

test('a running sandbox is forked in one call', async () => {
  const sandbox = await Sandbox.create({ snapshotTag: TAG, controller });
  await sandbox.eval('thought = 7');
  const children = await sandbox.fork(2);
  assert.deepEqual(await Promise.all(children.map((each) => each.eval('thought'))), ['7', '7']);
  const [first] = children;
  await first!.controller.updateSandbox(first!.id, { labels: { role: 'chosen', group: 'a' } });
  const found = await controller.listSandboxes({ labels: ['role=chosen', 'group'], status: 'running' });
  assert.deepEqual(found.map((each) => each.id), [first!.id]);
  await first!.exec('touch /root/mine');
  assert.deepEqual((await first!.diff(sandbox)).added, ['/root/mine']);
  const former = sandbox.id;
  await first!.promote();
  assert.equal(first!.id, former);
});
