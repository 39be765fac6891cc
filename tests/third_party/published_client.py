"""Run inside a venv that has the published client (forkd 0.5.3): drive our daemon through everything it can do."""

import os
import time

from forkd import Controller, ControllerError, Sandbox

PARENT = "python-numpy"
controller = Controller(os.environ["FORKD_URL"])
made = []


def refused(status, call, *args, **fields):
    try:
        call(*args, **fields)
    except ControllerError as error:
        assert error.status == status, (error.status, error.body)
        assert isinstance(error.body, dict) and error.body["error"], error.body
    else:
        raise AssertionError(f"{call} {args} was not refused with {status}")


def result(sandbox_id, code):
    answer = controller.eval_code(sandbox_id, code)
    assert answer["error"] is None, answer
    return answer["result"]


def main():
    rows = {row["tag"]: row for row in controller.list_snapshots()}
    assert rows[PARENT]["status"] == "ready" and rows[PARENT]["bootable"], rows
    first, second = controller.spawn_sandboxes(PARENT, n=2, memory_limit_mib=None, prewarm=True)
    for key in ("id", "snapshot_tag", "netns", "guest_addr", "created_at_unix", "pid", "memory_limit_mib"):
        assert key in first, key
    assert {row["id"] for row in controller.list_sandboxes()} == {first["id"], second["id"]}
    assert controller.get_sandbox(first["id"])["snapshot_tag"] == PARENT

    done = controller.exec_command(first["id"], ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("out\n", "err\n", 3), done
    late = controller.exec_command(first["id"], ["sleep", "60"], timeout_secs=1)
    assert late["exit_code"] == 124 and late["timed_out"], late
    assert controller.exec_command(first["id"], ["/no/such"])["exit_code"] == 127
    assert result(first["id"], "numpy.zeros(3).tolist()") == "[0.0, 0.0, 0.0]"
    assert "ZeroDivisionError" in controller.eval_code(first["id"], "1/0")["error"]
    assert controller.ping_sandbox(first["id"])["pong"] is True

    controller.eval_code(first["id"], "memory = 'of the source'")
    options = [{}, {"diff": True}, {"measure_diff": True}, {"mode": "full"}, {"mode": "diff"}, {"mode": "live"}]
    for number, fields in enumerate(options):
        snapshot = controller.branch_sandbox(first["id"], tag=f"t-published-{number}", **fields)
        made.append(snapshot["tag"])
        assert snapshot["branched_from"] == first["id"] and isinstance(snapshot["pause_ms"], int), snapshot
        grandchild = controller.spawn_sandboxes(snapshot["tag"], live_fork=fields.get("mode") == "live")[0]
        assert result(grandchild["id"], "memory") == "'of the source'"
        controller.kill_sandbox(grandchild["id"])
    assert result(first["id"], "memory") == "'of the source'"
    writing = controller.branch_sandbox(first["id"], mode="live", wait=False)
    made.append(writing["tag"])
    assert writing["status"] in ("writing", "ready"), writing
    deadline = time.monotonic() + 60
    while {row["tag"]: row for row in controller.list_snapshots()}[writing["tag"]]["status"] != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)

    refused(404, controller.get_sandbox, "sb-none")
    refused(404, controller.kill_sandbox, "sb-none")
    refused(404, controller.exec_command, "sb-none", ["true"])
    refused(404, controller.eval_code, "sb-none", "1")
    refused(404, controller.ping_sandbox, "sb-none")
    refused(404, controller.branch_sandbox, "sb-none")
    refused(404, controller.spawn_sandboxes, "no-such-tag")
    refused(404, controller.delete_snapshot, "no-such-tag")
    refused(400, controller.spawn_sandboxes, PARENT, n=0)
    refused(400, controller.spawn_sandboxes, PARENT, n=1001)
    refused(400, controller.spawn_sandboxes, "bad tag")
    refused(400, controller.exec_command, first["id"], [])
    refused(400, controller.branch_sandbox, first["id"], diff=True, measure_diff=True)
    refused(400, controller.branch_sandbox, first["id"], wait=False)
    refused(400, controller.branch_sandbox, first["id"], tag="bad tag")
    refused(409, controller.branch_sandbox, first["id"], tag=made[0])
    refused(409, controller.delete_snapshot, PARENT)

    guest = Sandbox(target=second["guest_addr"], spawn=False)
    assert guest.ping()["pong"] is True
    ran = guest.commands.run("echo $((6 * 7))")
    assert (ran.stdout, ran.exit_code) == ("42\n", 0), ran
    assert guest.commands.run(["sh", "-c", "exit 5"]).exit_code == 5
    assert guest.eval("1 + 1") == "2"
    try:
        guest.eval("1/0")
    except RuntimeError as error:
        assert "ZeroDivisionError" in str(error), error
    else:
        raise AssertionError("an error in the guest was not raised")

    for row in controller.list_sandboxes():
        controller.kill_sandbox(row["id"])
    assert controller.list_sandboxes() == []
    refused(404, controller.kill_sandbox, first["id"])


try:
    main()
finally:
    for tag in made:
        controller.delete_snapshot(tag)
print("published client ok")
