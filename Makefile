# Two commands: `make demo` and `make test`. Both set up everything they need; the rest is for people who work on forkd.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow fuzz setup deps lint unit vm binary test-binary docs bench bench-binary bench-branch clean

demo: setup
	$(BIN)/forkd quickstart -n 10

# Cases boot real machines on hosts of any load: one that fails is tried once more, and named as a rerun if it then passes.
# Then the cases of the command line, of forks and of branches again on the binary; make test-binary runs all of them.
test: setup lint dist/forkd
	$(BIN)/python -m pytest -q --reruns 1
	FORKD_TEST_BINARY=dist/forkd $(BIN)/python -m pytest -q --reruns 1 tests/unit/cli tests/vm/test_cli_daemon.py \
		tests/vm/test_cli_refusals.py tests/vm/test_fork.py tests/vm/test_branch.py

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
	$(BIN)/python -m pytest -q -m slow

fuzz: setup  ## ten minutes of damaged agent streams; the suite has 30 seconds of them
	FORKD_FUZZ_SECONDS=600 $(BIN)/python -m pytest -q tests/unit/test_fuzz_frames.py

binary: dist/forkd  ## one file that does everything, with its checksums and bill of materials

dist/forkd: $(READY) $(shell find -L forkd forkd.spec build -name '*.py' -o -name '*.spec' -o -name '*.md' -o -name '*.json')
	$(BIN)/pyinstaller --noconfirm --log-level WARN --workpath .work/pyinstaller --distpath dist forkd.spec
	cd dist && sha256sum forkd forkd.cdx.json > SHA256SUMS

test-binary: dist/forkd  ## the CLI and VM cases again, on the binary
	FORKD_TEST_BINARY=dist/forkd $(BIN)/python -m pytest -q tests/binary tests/vm tests/unit/cli
	$(BIN)/python -m pytest -q -m slow tests/binary

docs: setup  ## write what is generated: CLI and API reference, examples of the plugin guide, man page
	$(BIN)/python build/docs.py

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check 'numpy>=1.24'
	$(BIN)/python tests/bench/fork.py
	$(BIN)/python tests/bench/template.py

bench-binary: dist/forkd
	$(BIN)/python tests/bench/binary.py

bench-branch: setup  ## pause and total time of every mode, against QEMU's own; writes docs/branch-bench.json and .png
	$(BIN)/pip install --quiet --disable-pip-version-check 'matplotlib>=3.8'
	$(BIN)/python tests/bench/branch.py --throttled --chain

clean:
	rm -rf $(VENV) .work dist
