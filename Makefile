# Two commands: `make demo` and `make test`. Both set up everything they need; the rest is for people who work on forkd.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three workers on two processors, as many cases wait; each with files of cases and a data directory of its own. The long
# ones come first, but before them one that needs no parent while another worker makes it.
TOGETHER := -n 3 --dist loadfile --no-loadscope-reorder
SLOWEST_FIRST := tests/binary tests/vm tests/contract tests/unit tests/meta

.PHONY: demo test test-slow fuzz setup deps lint unit vm binary test-binary docs bench bench-parent bench-daemon \
	bench-everyday bench-hub bench-abuse bench-firecracker bench-binary bench-branch clean

demo: setup
	$(BIN)/forkd quickstart -n 10

# Cases boot real machines on hosts of any load: one that fails is tried again, twice at most, and named as a rerun if it passes then.
test: setup
	+$(MAKE) -j 2 lint dist/forkd
	$(BIN)/python -m pytest -q --reruns 2 $(TOGETHER) $(SLOWEST_FIRST)

setup: deps $(READY)

deps:
	@sh build/deps.sh

$(READY): pyproject.toml build/deps.sh
	$(PYTHON) -m venv $(VENV)
	mkdir -p .work
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -q tests/unit tests/meta

vm: setup
	$(BIN)/python -m pytest -q tests/vm

test-slow: setup  ## minutes each: soaks, thousands of clones
	$(BIN)/python -m pytest -q -m slow --timeout 0

fuzz: setup  ## ten minutes of damaged agent streams, and more made-up requests; the suite has some of both
	FORKD_FUZZ_SECONDS=600 $(BIN)/python -m pytest -q --timeout 0 tests/unit/test_fuzz_frames.py
	FORKD_FUZZ_EXAMPLES=100 $(BIN)/python -m pytest -q --timeout 0 tests/vm/test_schemathesis.py

binary: dist/forkd  ## one file that does everything, with its checksums and bill of materials

# Whatever of these is bundled as data has any name: guest/init, docs/*.png.
dist/forkd: $(READY) $(shell find -L forkd docs build forkd.spec pyproject.toml -type f -not -path '*/__pycache__/*')
	$(BIN)/pyinstaller --noconfirm --log-level WARN --workpath .work/pyinstaller --distpath dist forkd.spec
	cd dist && sha256sum forkd forkd.cdx.json > SHA256SUMS

CASES := tests/vm tests/unit/cli
test-binary: dist/forkd  ## the CLI and VM cases (or CASES=...) again, on the binary
	FORKD_TEST_BINARY=dist/forkd $(BIN)/python -m pytest -q --reruns 2 $(TOGETHER) $(CASES)

docs: setup  ## write what is generated: CLI and API reference, examples of the plugin guide, man page
	$(BIN)/python build/docs.py

# Benches run on the data directory (FORKD_DATA_DIR, or what `forkd where` says).
bench-parent: setup  ## the parent they fork, where there is none yet
	$(BIN)/forkd quickstart -n 1

bench: bench-parent
	$(BIN)/pip install --quiet --disable-pip-version-check 'numpy>=1.24'
	$(BIN)/python tests/bench/fork.py
	$(BIN)/python tests/bench/template.py

bench-daemon: bench-parent  ## what the daemon adds to the agent's link and to spawns; warm pools
	$(BIN)/python tests/bench/daemon.py

bench-everyday: bench-parent  ## first byte, files and output through a daemon, with the limit of each
	$(BIN)/python tests/bench/everyday.py

bench-hub: bench-parent  ## pack and unpack beside zstd
	$(BIN)/python tests/bench/hub.py "$$($(BIN)/forkd where)"

bench-abuse: bench-parent  ## neighbours of misbehaving children; as root
	$(BIN)/python tests/bench/abuse.py

bench-firecracker: setup  ## what a spawn on Firecracker costs our own process; needs neither Firecracker nor a parent
	$(BIN)/python tests/bench/firecracker_spawn.py

bench-binary: dist/forkd
	$(BIN)/python tests/bench/binary.py

bench-branch: bench-parent  ## pause and total time of every mode, against QEMU's own; writes docs/branch-bench.json and .png
	$(BIN)/pip install --quiet --disable-pip-version-check 'matplotlib>=3.8'
	$(BIN)/python tests/bench/branch.py --throttled --chain

clean:
	rm -rf $(VENV) .work dist
