// Calls every method of the TypeScript Controller with a fetch that answers nothing, and prints what each one asked for.
import { pathToFileURL } from 'node:url';

const { Controller } = await import(pathToFileURL(process.argv[2]).href);
const asked = {};
let name = '';
const controller = new Controller({
  baseUrl: 'http://parity',
  fetch: async (url, init) => {
    asked[name] ??= [init.method, new URL(url).pathname];
    const stream = init.headers.accept === 'application/x-ndjson';
    return new Response(stream ? '{"event":"result","result":null}\n' : '{}', { status: 200 });
  },
  connect: async (method, url) => {
    asked[name] ??= [method, new URL(url).pathname];
    throw new Error('recorded');
  },
});
const own = new Set();
for (let each = Controller.prototype; each !== Object.prototype; each = Object.getPrototypeOf(each)) {
  for (const key of Object.getOwnPropertyNames(each)) own.add(key);
}
for (name of own) {
  if (['constructor', 'baseUrl', 'long', 'transfer', 'upload', 'download'].includes(name)) continue;
  try {
    await controller[name]('X', 'X', 'X');
  } catch (error) {
    if (!asked[name]) throw error;
  }
}
console.log(JSON.stringify(asked));
