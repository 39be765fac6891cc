// Calls every method of the TypeScript Controller with all that its declared types let it take and a fetch that answers
// nothing; prints what each one asked for, and the methods of Sandbox.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [library] = process.argv.slice(2);
const ts = createRequire(library)('typescript');
const { Controller, Sandbox } = await import(pathToFileURL(library).href);
const declared = library.replace(/js$/, 'd.ts');
const program = ts.createProgram([declared], { strict: true, target: ts.ScriptTarget.ES2022, lib: ['lib.es2022.d.ts', 'lib.dom.d.ts'] });
const checker = program.getTypeChecker();
const exported = checker.getExportsOfModule(checker.getSymbolAtLocation(program.getSourceFile(declared)));

function instance(name) {
  const symbol = exported.find((each) => each.name === name);
  return checker.getDeclaredTypeOfSymbol(symbol.flags & ts.SymbolFlags.Alias ? checker.getAliasedSymbol(symbol) : symbol);
}

/** A value of a type: everything in it that may be given is. */
function value(type, at, depth = 0) {
  if (type.isUnion()) {
    const given = type.types.filter((each) => !(each.flags & (ts.TypeFlags.Undefined | ts.TypeFlags.Null)));
    return value(given[given.length - 1], at, depth);
  }
  if (type.isStringLiteral() || type.isNumberLiteral()) return type.value;
  if (type.flags & ts.TypeFlags.StringLike) return 'X';
  if (type.flags & ts.TypeFlags.NumberLike) return 1;
  if (type.flags & ts.TypeFlags.BooleanLike) return true;
  if (checker.isArrayType(type)) return [value(checker.getTypeArguments(type)[0], at, depth + 1)];
  if (type.getCallSignatures().length) return () => undefined;
  if (['AbortSignal', 'Uint8Array', 'ReadableStream'].includes(type.symbol?.name)) return undefined;
  if (depth > 2 || !(type.flags & (ts.TypeFlags.Object | ts.TypeFlags.Intersection))) return {};
  const entries = type.getProperties().map((each) => [each.name, value(checker.getTypeOfSymbolAtLocation(each, at), at, depth + 1)]);
  return Object.fromEntries(entries.filter(([, each]) => each !== undefined));
}

const asked = {};
let name = '';
function note(method, url, body) {
  const { pathname, searchParams } = new URL(url);
  const fields = typeof body === 'string' && body.startsWith('{') ? Object.keys(JSON.parse(body)) : [];
  asked[name] ??= [method, pathname, [...searchParams.keys(), ...fields]];
}
const controller = new Controller({
  baseUrl: 'http://parity',
  fetch: async (url, init) => {
    note(init.method, url, init.body);
    const stream = init.headers.accept === 'application/x-ndjson';
    return new Response(stream ? '{"event":"result","result":null}\n' : '{}', { status: 200 });
  },
  connect: async (method, url) => {
    note(method, url);
    throw new Error('recorded');
  },
});
const hidden = ts.ModifierFlags.Private | ts.ModifierFlags.Protected;
function methods(type) {
  const declarations = type.getProperties().map((each) => each.valueDeclaration);
  return declarations.filter((each) => ts.isMethodDeclaration(each) && !(ts.getCombinedModifierFlags(each) & hidden));
}
for (const method of methods(instance('Controller'))) {
  name = method.name.text;
  try {
    await controller[name](...method.parameters.map((each) => value(checker.getTypeAtLocation(each), each)));
  } catch (error) {
    if (!asked[name]) throw error;
  }
}
const sandbox = methods(instance('Sandbox')).map((each) => each.name.text);
console.log(JSON.stringify({ asked, sandbox: sandbox.filter((each) => each in Sandbox.prototype) }));
