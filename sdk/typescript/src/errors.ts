/** A request failed: `status` is the HTTP status (503: nobody there, 504: too late), `code` and `hint` say what and why. */
export class ControllerError extends Error {
  readonly code: string | null;
  readonly hint: string | null;

  constructor(
    readonly status: number,
    readonly body: unknown,
    readonly url: string,
  ) {
    const fields = (typeof body === 'object' && body !== null ? body : {}) as Record<string, unknown>;
    super(typeof fields['error'] === 'string' ? fields['error'] : String(body));
    this.name = 'ControllerError';
    this.code = typeof fields['code'] === 'string' ? fields['code'] : null;
    this.hint = typeof fields['hint'] === 'string' ? fields['hint'] : null;
  }
}
