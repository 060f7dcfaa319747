# `just verify` never writes; `just fix` does. `./test` runs everything there is.
# One profile for everything, so that build scripts and macros are built once.

# What a reviewer wants to be true before reading.
verify: format lint doc rules

# Formatting, checked.
format:
    cargo fmt --all --check

# Lints; a warning is an error.
lint:
    cargo clippy --release --locked --workspace --all-targets -- -D warnings

# Documentation, with its examples run.
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps
    cargo test -q --release --locked --workspace --doc

# Arrows, sizes, habits, licences.
rules:
    cargo test --release --locked --workspace --test rules

# What a tool can put right.
fix:
    cargo fmt --all
    cargo clippy --release --workspace --all-targets --fix --allow-dirty --allow-staged
    cargo build --release --workspace --bins
    target/release/ratchet tighten

# Records what is above a measure of STYLE.md; defend the diff.
ratchet: build
    target/release/ratchet accept

# The binary.
build:
    cargo build --release --locked --workspace --bins

# Unit and crate tests.
unit:
    #!/usr/bin/env bash
    set -euo pipefail
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --release --locked --workspace --no-fail-fast
    else
        cargo test --release --locked --workspace --lib --bins --tests --no-fail-fast
    fi

# The quorum under faults, so many seeds of them; `just simulate 1 --seed N` replays one.
simulate seeds="1000" *options:
    cargo build --profile ci --locked --workspace --bin simulate-quorum
    target/ci/simulate-quorum --seeds {{seeds}} {{options}}

# Bugs planted into a copy of the sources, each of which the simulation must find: the seeds that are known to, or with
# `--hunt` the first that does.
planted *options:
    cargo build --profile ci --locked --workspace --bin plant-bugs
    target/ci/plant-bugs {{options}}

# Everything, as CI does.
test *suites:
    ./test {{suites}}

# What the proxy adds, beside a direct connection and HAProxy.
bench *options: build
    target/release/bench {{options}}

# What a durable write, a lookup and a snapshot cost, beside this disk's fdatasync and beside etcd.
bench-ledger *options: build
    target/release/bench_ledger {{options}}

# What a lookup costs among 2 M blocks at 32 workers, what events and blocks do, and lookups while 1 M events come in.
bench-residency:
    cargo run --release --locked -p workers-shim --example residency_speed

# Made-up input for whatever reads what engines and clients send: so many seconds for each target, or for one. Needs nightly and
# `cargo install cargo-fuzz`. What it finds lies in target/fuzz-corpus: with its mend it belongs into tests/fuzz/corpus, which
# `./test unit` replays without either.
fuzz seconds="60" *targets:
    #!/usr/bin/env bash
    set -euo pipefail
    targets="{{targets}}"
    for target in ${targets:-events bodies answers prompts templates}; do
        mkdir -p target/fuzz-corpus/$target
        cargo +nightly fuzz run -s none --fuzz-dir tests/fuzz --target-dir target/fuzz $target \
            target/fuzz-corpus/$target tests/fuzz/corpus/$target -- -max_total_time={{seconds}} -timeout=10 \
            -rss_limit_mb=1024 -malloc_limit_mb=256 -max_len=16384 -print_final_stats=1 -artifact_prefix=target/fuzz-corpus/$target-
    done

# Real vLLM with a small cache against the residency index, so many random requests of them.
residency requests="10000":
    RESIDENCY_REQUESTS={{requests}} tests/engines/run -s -k residency

# Prompts of random conversations in all committed families, put together and whole, so many conversations.
incremental cases="20000":
    PROPTEST_CASES={{cases}} cargo test --release --locked -p prefix --lib incremental_prompts_equal_whole_ones

# What it costs to know a step's prompt and who holds it, as its context grows.
bench-prefix *options: build
    target/release/bench_prefix {{options}}

# Partitions, kills, full disks and damaged logs under load, in network namespaces; `--quick` does each once.
nemesis *options: build
    target/release/nemesis {{options}}

# Recorded agent sessions over simulated workers, with a live view.
demo *options:
    cargo run --release -- demo {{options}}
