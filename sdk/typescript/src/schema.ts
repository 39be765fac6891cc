// Written by build/typescript.py from the daemon's own description of its API; do not edit.

/** Capture a running sandbox. `mode` is full, diff or live; `diff` and `live` are older spellings of it. Without `labels` the snapshot has those of the sandbox. */
export interface BranchRequest {
  tag?: string | null;
  mode?: string | null;
  diff?: boolean;
  live?: boolean;
  measure_diff?: boolean;
  wait?: boolean;
  parent_tag?: string | null;
  labels?: Record<string, string> | null;
}

/** Build a disk; `output` additionally copies it to a file of the host. */
export interface BuildRootfs {
  image: string;
  extras?: string[];
  size_mib?: number;
  output?: string | null;
}

/** Change permission bits. */
export interface ChangeMode {
  path: string;
  mode: number;
}

/** Find what dead processes left; with `remove` also remove it. */
export interface Cleanup {
  remove?: boolean;
}

/** Flatten a chain into a new snapshot that stands alone. */
export interface Compact {
  to: string;
}

/** Fork `n` children from a snapshot; with `partial` those that come up stay although others failed. `spawn` is auto, template (clone them) or restore; absent, the settings decide. */
export interface CreateSandboxes {
  snapshot_tag: string;
  n?: number;
  per_child_netns?: boolean;
  network?: string;
  allow?: string[];
  memory_limit_mib?: number | null;
  cpu_limit?: number | null;
  pids_limit?: number | null;
  io_limit_mibps?: number | null;
  best_effort?: boolean;
  prewarm?: boolean;
  keep_workdir?: boolean;
  live_fork?: boolean;
  memory_backend?: string | null;
  hugepages?: boolean;
  partial?: boolean;
  spawn?: string | null;
  name?: string | null;
  labels?: Record<string, string> | null;
  metadata?: Record<string, string> | null;
  env?: Record<string, string> | null;
  timeout_secs?: number | null;
  idle_pause_secs?: number | null;
}

/** Boot a parent and capture it: from an `image` reference, or from `rootfs` (and `kernel`) files. `tap` is a device of the host that leads to the network while it boots and warms up; its children have their own. With `reuse` a snapshot that has the tag already, or is just being made by another request, is the answer. */
export interface CreateSnapshot {
  tag: string;
  reuse?: boolean;
  image?: string | null;
  extras?: string[];
  size_mib?: number;
  kernel?: string | null;
  initrd?: string | null;
  rootfs?: string | null;
  rw?: boolean;
  tap?: string | null;
  boot_wait_secs?: number;
  mem_size_mib?: number;
  vcpus?: number;
  warmup?: string[];
  volumes?: VolumeRequest[];
  labels?: Record<string, string>;
}

/** A sandbox under a name; everything but `n` is as for a sandbox, and is kept for when it is resumed. */
export interface CreateWorkspace {
  snapshot_tag: string;
  n?: number;
  per_child_netns?: boolean;
  network?: string;
  allow?: string[];
  memory_limit_mib?: number | null;
  cpu_limit?: number | null;
  pids_limit?: number | null;
  io_limit_mibps?: number | null;
  best_effort?: boolean;
  prewarm?: boolean;
  keep_workdir?: boolean;
  live_fork?: boolean;
  memory_backend?: string | null;
  hugepages?: boolean;
  partial?: boolean;
  spawn?: string | null;
  name: string;
  labels?: Record<string, string> | null;
  metadata?: Record<string, string> | null;
  env?: Record<string, string> | null;
  timeout_secs?: number | null;
  idle_pause_secs?: number | null;
}

/** Every error: one sentence, a stable code, what to do about it if anything, and extras for programs. */
export interface ErrorBody {
  error: string;
  code: string;
  hint?: string | null;
  details?: Record<string, unknown>;
}

/** Evaluate code in the warm interpreter. */
export interface EvalRequest {
  code: string;
  timeout_secs?: number;
}

/** What the warm interpreter answered: `result` is the last expression's repr, `stdout` what was printed. */
export interface EvalResult {
  result: string | null;
  error: string | null;
  exit_code: number;
  stdout?: string;
  traceback?: string | null;
  result_json?: unknown;
}

/** Run a command: `args`, or `shell` for a line of shell. `stdin` is text given to it; without it the command reads from /dev/null. */
export interface ExecRequest {
  args?: string[];
  shell?: string | null;
  timeout_secs?: number;
  env?: Record<string, string>;
  cwd?: string | null;
  user?: string | null;
  stdin?: string | null;
}

/** How a command in the guest ended. `reason` is `exited`, `signaled`, `timed_out` or `not_found`; `exit_code` is the command's own code, or 128 + signal, 124 and 127 (126 if it may not be executed) in the other cases, as shells do. */
export interface ExecResult {
  stdout: string;
  stderr: string;
  exit_code: number;
  reason?: string;
  signal?: number | null;
  timed_out?: boolean;
  truncated?: boolean;
  error?: string | null;
}

/** One child of a spawn that did not come up, and why. */
export interface FailedChild {
  error: string;
  code: string;
  hint?: string | null;
  details?: Record<string, unknown>;
  index: number;
  status: number;
}

/** Fork `n` children of `source`, run one command in each (its number is in FORKD_INDEX), keep the best. `best` scores a child, the highest wins: numbers, + - * /, comparisons, `A if B else C`, and the names exit_code, seconds and value (the last line of stdout as a number). */
export interface FanoutRequest {
  source: string;
  n?: number;
  args?: string[];
  shell?: string | null;
  env?: Record<string, string>;
  timeout_secs?: number;
  network?: string;
  keep?: number;
  best?: string;
}

/** One child of a fan-out: how its command ended, or why it could not be run; its score, None for no number. */
export interface FanoutRow {
  index: number;
  id: string;
  result?: ExecResult | null;
  seconds?: number;
  score?: number | null;
  kept?: boolean;
  error?: string | null;
}

/** A file in a guest. A name that is not UTF-8 has its bytes in `name_b64` besides. */
export interface FileEntry {
  path: string;
  name: string;
  type: string;
  size: number;
  mode: number;
  mtime: number;
  uid: number;
  gid: number;
  target?: string | null;
  name_b64?: string | null;
}

/** A file of the store by content: `digest` is `sha256:…` (plain) or `sparse256:…` (formats/delta.md). */
export interface FileRef {
  digest: string;
  size: number;
}

/** Fork `n` children of `source`, a running sandbox (by id or name) or a snapshot (by tag). `all_children` is for every child, `per_child` for the first, second … besides. `mode` (full, diff, live) branches a running source into a snapshot first; without it nothing is written. `on_partial` is keep or rollback. */
export interface ForkRequest {
  source: string;
  n?: number;
  mode?: string | null;
  all_children?: SandboxDetails;
  per_child?: SandboxDetails[];
  network?: string;
  allow?: string[];
  on_partial?: string;
  deadline_secs?: number | null;
  idempotency_key?: string | null;
}

/** Fork `n` children of a running sandbox, all from the same instant, with limits of their own. */
export interface ForkSandbox {
  n?: number;
  memory_limit_mib?: number | null;
  cpu_limit?: number | null;
  pids_limit?: number | null;
  io_limit_mibps?: number | null;
  best_effort?: boolean;
}

/** A process in a guest, whoever started it. */
export interface GuestProcess {
  pid: number;
  args: string[];
}

/** Ask whether a package would run here. */
export interface HubCheck {
  target: string;
  hub?: string | null;
}

/** Make a signing key. */
export interface HubKeygen {
  name?: string;
}

/** Keep a login for a registry, or forget it. */
export interface HubLogin {
  url: string;
  token?: string | null;
  username?: string | null;
  password?: string | null;
  forget?: boolean;
}

/** Sign a pack file of the host. */
export interface HubSign {
  path: string;
  key?: string;
}

/** Trust a public key under a name; without a key, stop trusting that name. */
export interface HubTrust {
  name: string;
  key?: string | null;
}

/** One thing found: `action` is DEL, or SKIP with the reason why it is in use. */
export interface Leftover {
  path: string;
  bytes: number;
  action: string;
  reason: string;
}

/** What is kept of a log: from position `begin` (bytes before it are gone) to `end`. */
export interface LogText {
  source: string;
  text: string;
  begin: number;
  end: number;
}

/** Make a directory; `parents` also makes what is missing above it, and is content if it is there. */
export interface MakeDirectory {
  path: string;
  mode?: number;
  parents?: boolean;
}

/** Give a file or directory another name. */
export interface MoveFile {
  source: string;
  target: string;
}

/** Write a snapshot's pack to `out`, a path of the host. `sign` is the name or the file of a key. */
export interface PackRequest {
  tag: string;
  out?: string | null;
  description?: string;
  base_image?: string;
  since?: string | null;
  bundle?: boolean;
  sign?: string | null;
}

/** The answer when only some children came up. */
export interface PartialSpawn {
  sandboxes: SandboxInfo[];
  failed: FailedChild[];
}

/** The machines that wait for a snapshot's next children: how many shall, how many do, and what hinders it. */
export interface PoolInfo {
  tag: string;
  size: number;
  waiting: number;
  problem?: string | null;
}

/** Change what children of a branch begin with: defaults of commands, and a warm runtime. `args` is started and must say ready; with `lang` (such as `node`) evals go to it from then on. */
export interface PrepareRequest {
  env?: Record<string, string>;
  workdir?: string | null;
  user?: string | null;
  args?: string[] | null;
  lang?: string | null;
  timeout_secs?: number;
}

/** A command in a guest. `output_begin` and `output_end` are the positions of what can still be read. `reason` is as in ExecResult, or `lost` if the sandbox ended first; `truncated`: the oldest output is gone. */
export interface ProcessInfo {
  pid: number;
  args: string[];
  started_at_unix: number;
  running: boolean;
  tag?: string | null;
  pty?: boolean;
  reason?: string | null;
  exit_code?: number | null;
  signal?: number | null;
  error?: string | null;
  output_begin?: number;
  output_end?: number;
  truncated?: boolean;
}

/** What is buffered of a process's output, in base64. */
export interface ProcessOutput {
  process: ProcessInfo;
  stdout: string;
  stderr: string;
}

/** Remove what the rules let go; the first rule whose labels a snapshot has decides about it. */
export interface PruneRequest {
  rules: RetentionRule[];
  dry_run?: boolean;
}

/** What becomes of a snapshot: `action` is `remove` or `keep`; `bytes` is what it takes on the disk. */
export interface PruneRow {
  tag: string;
  action: string;
  reason: string;
  bytes: number;
  created_at_unix: number;
  labels?: Record<string, string>;
}

/** What a prune did, or with `dry_run` would do; `freed_bytes` is what those to remove take on the disk. */
export interface Pruned {
  dry_run: boolean;
  freed_bytes: number;
  rows: PruneRow[];
}

/** Fetch a snapshot from `target`: a package reference, or the URL of a pack file. */
export interface PullRequest {
  target: string;
  hub?: string | null;
  tag?: string | null;
  force?: boolean;
  trust?: string | null;
}

/** Send a snapshot to `target`: a package reference, or the URL of a pack file. */
export interface PushRequest {
  tag: string;
  target: string;
  hub?: string | null;
  description?: string;
  base_image?: string;
  since?: string | null;
  sign?: string | null;
}

/** Which snapshots may go: those with all `labels` (`name=value`, or `name`: each of its values apart). `keep_last` newest ones always stay. Of the others those older than `older_than_secs` go, and the oldest until the rest takes `max_bytes`; with neither of the two, all of them. */
export interface RetentionRule {
  labels?: string[];
  keep_last?: number | null;
  older_than_secs?: number | null;
  max_bytes?: number | null;
}

/** The snapshot to go back to: one the sandbox was forked from, or was branched into. */
export interface RollbackRequest {
  tag: string;
}

/** What one child of a fork is given. `timeout_secs` counts from then; 0 means no limit. `network` and `allow` are for the fork verb, in place of the request's. */
export interface SandboxDetails {
  name?: string | null;
  labels?: Record<string, string> | null;
  metadata?: Record<string, string> | null;
  env?: Record<string, string> | null;
  limits?: UpdateSandbox | null;
  timeout_secs?: number | null;
  idle_pause_secs?: number | null;
  network?: string | null;
  allow?: string[] | null;
}

/** How a sandbox or a snapshot differs from `against`, another one. `unread` are directories that could not be compared; `truncated`: there is more. Memory is what each has written since it was forked; of a snapshot, what is in layers the other does not build on. */
export interface SandboxDiff {
  id: string;
  against: string;
  added?: string[];
  changed?: string[];
  removed?: string[];
  unread?: string[];
  truncated?: boolean;
  processes_started?: GuestProcess[];
  processes_ended?: GuestProcess[];
  ports_opened?: number[];
  ports_closed?: number[];
  changed_memory_bytes: number;
  against_changed_memory_bytes?: number | null;
}

/** A running child as the REST API shows it. */
export interface SandboxInfo {
  id: string;
  snapshot_tag: string;
  created_at_unix: number;
  netns?: string | null;
  guest_addr?: string;
  network?: string;
  allow?: string[];
  per_child_netns?: boolean;
  pid?: number | null;
  memory_limit_mib?: number | null;
  cpu_limit?: number | null;
  pids_limit?: number | null;
  io_limit_mibps?: number | null;
  best_effort?: boolean;
  limits_hit?: string[];
  has_branched?: boolean;
  last_branch_memory_path?: string | null;
  branch_count?: number;
  status?: string;
  hostname?: string;
  spawn_ms?: number;
  spawned_by?: string;
  memory_backend?: string;
  warnings?: string[];
  name?: string | null;
  labels?: Record<string, string>;
  metadata?: Record<string, string>;
  env?: Record<string, string>;
  timeout_secs?: number | null;
  expires_at_unix?: number | null;
  idle_pause_secs?: number | null;
  auto_paused?: boolean;
  forked_from?: string | null;
}

/** How many machines shall wait for the snapshot's next children; 0 for none. */
export interface SetPool {
  size: number;
}

/** Fetch the guest kernel, or take in the `kernel` of that path on the daemon's host, and make the initramfs. */
export interface Setup {
  kernel?: string | null;
  refresh?: boolean;
}

/** Signal a process's whole group, by name or number. */
export interface SignalProcess {
  signal?: string | number;
}

/** A snapshot as the REST API shows it. */
export interface SnapshotInfo {
  tag: string;
  dir: string;
  created_at_unix: number;
  status: string;
  bootable: boolean;
  branched_from?: string | null;
  parent_tag?: string | null;
  pause_ms?: number | null;
  pause_exact_ms?: number | null;
  capture_ms?: number | null;
  changed_pages?: number | null;
  diff_ms?: number | null;
  diff_physical_bytes?: number | null;
  diff_logical_bytes?: number | null;
  mem_mib?: number | null;
  vcpus?: number | null;
  physical_bytes?: number | null;
  logical_bytes?: number | null;
  shared_bytes?: number | null;
  engine?: string | null;
  accelerator?: string | null;
  image?: string | null;
  warning?: string | null;
  labels?: Record<string, string>;
  pinned?: boolean;
  source?: Record<string, unknown> | null;
  volumes?: Volume[];
}

/** Start a command that outlives the request: `args`, or `shell` for a line of shell. `stdin`: input will be sent, else it reads /dev/null. `pty` gives it a terminal. `tag` is another way to name it. Without `timeout_secs` it may run for ever. `attach`: somebody is about to listen, so no output is dropped before; a command that says more than the buffer holds is held up until then, for half a minute at most. */
export interface StartProcess {
  args?: string[];
  shell?: string | null;
  env?: Record<string, string>;
  cwd?: string | null;
  user?: string | null;
  stdin?: boolean;
  attach?: boolean;
  pty?: TerminalSize | null;
  timeout_secs?: number | null;
  tag?: string | null;
}

/** Capture the workspace's sandbox and end it; with `diff` only what changed since it was resumed is written. */
export interface SuspendWorkspace {
  diff?: boolean;
}

/** Size of a terminal in characters. */
export interface TerminalSize {
  rows?: number;
  cols?: number;
}

/** Take in the pack file `path` of the host. `trust` is off, warn or require. */
export interface UnpackRequest {
  path: string;
  tag?: string | null;
  force?: boolean;
  trust?: string | null;
}

/** Change a running sandbox; what is absent stays. With `best_effort` a limit that cannot be had is a warning. */
export interface UpdateSandbox {
  memory_limit_mib?: number | null;
  cpu_limit?: number | null;
  pids_limit?: number | null;
  io_limit_mibps?: number | null;
  best_effort?: boolean;
  name?: string | null;
  labels?: Record<string, string> | null;
  metadata?: Record<string, string> | null;
  env?: Record<string, string> | null;
  timeout_secs?: number | null;
  idle_pause_secs?: number | null;
}

/** Change what is noted about a snapshot; what is absent stays. One that is `pinned` is not removed. */
export interface UpdateSnapshot {
  pinned?: boolean | null;
  labels?: Record<string, string> | null;
}

/** A disk besides the rootfs, and where the guest has it. It is never written to: what a guest writes to one that is not `read_only` stays in its own RAM. */
export interface Volume {
  disk: FileRef;
  guest_path: string;
  read_only?: boolean;
}

/** An ext4 image of the host, and where the guest shall have it. The image is never written to. */
export interface VolumeRequest {
  host_path: string;
  guest_path: string;
  read_only?: boolean;
}

/** A change below a directory: `type` is create, write, remove, rename, chmod, or overflow (events were lost). */
export interface WatchEvent {
  type: string;
  path: string;
  dir?: boolean;
}

/** A named sandbox whose state outlives it. `status` is `running`, `suspended`, or `stale` if its sandbox ended by itself; `reason` then says how. */
export interface WorkspaceInfo {
  id: string;
  name: string;
  source_snapshot_tag: string;
  current_state_tag?: string | null;
  status?: string;
  live_sandbox_id?: string | null;
  created_at_unix: number;
  last_active_unix: number;
  last_branch_memory_path?: string | null;
  reason?: string | null;
}
