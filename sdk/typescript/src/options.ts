/** `snapshot_tag` to `snapshotTag`, for the names of an interface's fields. */
export type CamelCase<S extends string> = S extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelCase<Tail>>}`
  : S;

/** Fields of a request as options: camelCase, none of them null, `undefined` the same as absent. */
export type Options<T, Left extends keyof T = never> = {
  [K in Exclude<keyof T, Left> as K extends string ? CamelCase<K> : never]?: Exclude<T[K], null> | undefined;
};

/** Options as the API spells them; those that are undefined are left out. */
export function body(options: object): Record<string, unknown> {
  const out: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(options)) {
    if (value !== undefined) out[name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)] = value;
  }
  return out;
}
