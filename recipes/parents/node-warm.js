// A warm Node for `eval`, by forkd's warm-up contract: say ready, then answer each line {"id", "code"} with
// {"id", "result", "stdout"} or {"id", "error", "stack", "stdout"}. Names last from call to call; the value of the last
// expression is the result, awaited if it is a promise, and given as JSON.
'use strict';
const crypto = require('crypto');
const fs = require('fs');
const readline = require('readline');
const util = require('util');
const vm = require('vm');

const LIMIT = 1 << 20;
const say = (message) => fs.writeSync(1, JSON.stringify(message) + '\n');

// A forked guest has a copy of every generator's state; only the kernel's was made unique. So ask the kernel. (What
// OpenSSL does by itself, such as TLS keys, is out of reach from here: start a process of its own for that.)
const kernel = fs.openSync('/dev/urandom', 'r');
const fill = (view) => {
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  for (let done = 0; done < bytes.length; ) done += fs.readSync(kernel, bytes, done, bytes.length - done, null);
  return view;
};
const randomFillSync = (view, offset = 0, size = view.byteLength - offset) =>
  (fill(new Uint8Array(view.buffer || view, (view.byteOffset || 0) + offset, size)), view);
const randomBytes = (size, done) => {
  const bytes = fill(Buffer.alloc(size));
  return done ? void setImmediate(done, null, bytes) : bytes;
};
const randomUUID = () => {
  const bytes = fill(Buffer.alloc(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return bytes.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})/, '$1-$2-$3-$4-');
};
const randomInt = (low, high, done) => {
  if (typeof high !== 'number') [low, high, done] = [0, low, high];
  const value = low + Number(fill(new BigUint64Array(1))[0] % BigInt(high - low));
  return done ? void setImmediate(done, null, value) : value;
};
const replace = (where, values) => {
  for (const [name, value] of Object.entries(values)) {
    Object.defineProperty(where, name, { value, writable: true, configurable: true, enumerable: true });
  }
};
replace(crypto, { randomFillSync, randomBytes, randomUUID, randomInt });
replace(crypto.webcrypto, { randomUUID, getRandomValues: fill });

// Math.random has to be quick, so it is a small generator of ours, seeded anew for every eval.
const state = new BigUint64Array(2);
Math.random = () => {
  let [low, high] = [state[0], state[1]];
  state[0] = high;
  low ^= BigInt.asUintN(64, low << 23n);
  state[1] = low ^ high ^ (low >> 18n) ^ (high >> 5n);
  return Number((state[1] + high) & 0x1fffffffffffffn) / 0x20000000000000;
};

let printed = '';
const print = (...values) => {
  if (printed.length < LIMIT) printed += util.format(...values) + '\n';
};
Object.assign(console, { log: print, info: print, debug: print, warn: print, error: print });
replace(globalThis, { require, crypto: crypto.webcrypto });
for (const name of require('module').builtinModules) {
  if (/^[a-z_]+$/.test(name) && !(name in globalThis)) {
    Object.defineProperty(globalThis, name, { configurable: true, get: () => require(name), enumerable: false });
  }
}

const plain = (value) => {
  if (value === undefined) return null;
  try {
    const text = JSON.stringify(value);
    if (text !== undefined && text.length <= LIMIT) return JSON.parse(text);
  } catch {
    // circular, or a BigInt: shown as a person would see it
  }
  return util.inspect(value).slice(0, LIMIT);
};

const answer = async ({ id, code, env = {} }) => {
  for (const [name, value] of Object.entries(env)) {
    if (value === null) delete process.env[name];
    else process.env[name] = value;
  }
  fill(state);
  printed = '';
  try {
    const result = await vm.runInThisContext(code, { filename: `eval-${id}.js` });
    say({ id, result: plain(result), stdout: printed });
  } catch (error) {
    const stack = error instanceof Error ? error.stack : undefined;
    say({ id, error: String(error), stack, stdout: printed });
  }
};

process.on('uncaughtException', (error) => print('uncaught:', error));
process.on('unhandledRejection', (error) => print('unhandled:', error));
let line = Promise.resolve();
readline.createInterface({ input: process.stdin }).on('line', (text) => {
  line = line.then(() => answer(JSON.parse(text)));
});
(async () => {
  for (const code of ['1 + 1', 'JSON.stringify({a: [1, 2]})']) await vm.runInThisContext(code);
  say({ ready: true });
})();
