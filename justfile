# `just verify` never writes; `just fix` does. `./test` is the gate, `./test --deep` everything.
# Suites share one build, the profile `ci`; what measures and what ships is built with `release`.

# What a reviewer wants to be true before reading.
verify: format lint unit doc deny

# Formatting, checked.
format:
    cargo fmt --all --check

# Lints; a warning is an error.
lint:
    cargo clippy --profile ci --locked --workspace --lib --bins --tests --all-features -- -D warnings

# Documentation; a warning is an error.
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --profile ci --locked --workspace --no-deps

# Arrows, habits, budgets.
rules:
    cargo nextest run --config tests/unit-profile.toml --cargo-profile ci --locked --workspace -E 'binary(rules)'

# Licences, sources and banned crates, which the test `dependencies` checks without the tool, too; then known vulnerabilities, where
# RustSec's database can be had.
deny:
    @PATH="$PWD/target/tools/bin:$PATH" cargo deny --version >/dev/null || { echo "cargo-deny is missing: tests/scripts/setup deny"; exit 1; }
    PATH="$PWD/target/tools/bin:$PATH" cargo deny --locked check bans licenses sources
    PATH="$PWD/target/tools/bin:$PATH" tests/scripts/advisories

# The book, in target/book; a warning is an error.
book:
    #!/usr/bin/env bash
    set -euo pipefail
    export PATH="$PWD/target/tools/bin:$PATH"
    command -v mdbook >/dev/null || { echo "mdbook is missing: tests/scripts/setup mdbook"; exit 1; }
    output=$(mdbook build docs 2>&1) || { echo "$output"; exit 1; }
    echo "$output"
    ! grep -E '^ *(WARN|ERROR) ' <<<"$output"

# The book's reference of settings, metrics, operator API and command line, written anew from the code.
reference:
    cargo run --profile ci --locked --bin ownerserve -- reference docs/src/reference

# What a tool can put right.
fix:
    cargo fmt --all
    cargo clippy --profile ci --workspace --lib --bins --tests --all-features --fix --allow-dirty --allow-staged

# Binaries as the suites use them.
build:
    cargo build --profile ci --locked --workspace --bins

# Unit and crate tests.
unit *options:
    cargo nextest run --config tests/unit-profile.toml --cargo-profile ci --locked --workspace --no-fail-fast --failure-output final {{options}}

# How many bytes of a body are visited: a build of its own, which counts them.
bytes:
    cargo nextest run --config tests/unit-profile.toml --cargo-profile ci --locked -p proxy --features count-bytes -E 'test(a_body_is_visited_once_and_a_grown_one_compared_once)'

# The quorum under faults, so many seeds of them; `just simulate 1 --seed N` replays one.
simulate seeds="1000" *options:
    cargo build --profile ci --locked --workspace --bin simulate-quorum
    target/ci/simulate-quorum --seeds {{seeds}} {{options}}

# Plants each known bug into a copy of the sources and replays the recorded seed that finds it; `--hunt` searches from seed 1.
planted *options:
    cargo build --profile ci --locked --workspace --bin plant-bugs
    target/ci/plant-bugs {{options}}

# The gate, or some suites.
test *suites:
    ./test {{suites}}

# What ships, and what measures it.
release:
    cargo build --release --locked
    cargo build --release --locked -p tests --features bench --bins

# What the proxy adds, beside a direct connection, HAProxy, and the routers that `tests/scripts/setup peers` installs.
[positional-arguments]
bench *options: release
    target/release/bench "$@"

# The same, with the binary of an earlier commit beside it.
[positional-arguments]
bench-before commit="HEAD~1" *options: release
    #!/usr/bin/env bash
    set -euo pipefail
    git worktree remove --force target/before-sources 2>/dev/null || true
    commit=$1
    shift
    git worktree add --force --detach target/before-sources "$(git rev-parse --verify "$commit^{commit}")"
    trap 'git worktree remove --force target/before-sources' EXIT
    (cd target/before-sources && cargo build --release --locked -p router --bins --target-dir ../before)
    target/release/bench --before target/before/release/ownerserve "$@"

# What a durable write, a lookup and a snapshot cost, beside this disk's fdatasync and beside etcd.
bench-ledger *options: release
    target/release/bench_ledger {{options}}

# What a lookup costs among 2 M blocks at 32 workers, what events and blocks do, and lookups while 1 M events come in.
bench-residency:
    cargo run --release --locked -p workers-shim --example residency_speed

# Made-up input for whatever reads what engines and clients send: so many seconds for each target, or for one. Needs nightly and
# `cargo install cargo-fuzz`. It goes on from the inputs of earlier runs (tests/fuzz/found.tar.xz), in target/fuzz-corpus. An input
# that breaks something belongs, with its mend, into tests/fuzz/corpus, which `./test unit` replays without either.
fuzz seconds="60" *targets:
    #!/usr/bin/env bash
    set -euo pipefail
    targets="{{targets}}"
    if [ ! -d target/fuzz-corpus ]; then
        mkdir -p target/fuzz-corpus
        tar -xJf tests/fuzz/found.tar.xz -C target/fuzz-corpus
    fi
    for target in ${targets:-events bodies growth answers nodes prompts templates zmtp values exchanges}; do
        mkdir -p target/fuzz-corpus/$target
        cargo +nightly fuzz run -s none --fuzz-dir tests/fuzz --target-dir target/fuzz $target \
            target/fuzz-corpus/$target tests/fuzz/corpus/$target -- -max_total_time={{seconds}} -timeout=10 \
            -rss_limit_mb=1024 -malloc_limit_mb=256 -max_len=16384 -print_final_stats=1 -artifact_prefix=target/fuzz-corpus/$target-
    done

# Keeps the inputs of target/fuzz-corpus that reach different code, for the next run of `just fuzz`.
fuzz-keep:
    #!/usr/bin/env bash
    set -euo pipefail
    rm -rf target/fuzz-found
    for target in events bodies growth answers nodes prompts templates zmtp values exchanges; do
        mkdir -p target/fuzz-found/$target
        cargo +nightly fuzz run -s none --fuzz-dir tests/fuzz --target-dir target/fuzz $target target/fuzz-found/$target \
            target/fuzz-corpus/$target tests/fuzz/corpus/$target -- -merge=1 -max_len=65536 -timeout=60
    done
    tar --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C target/fuzz-found -c . | xz -9e -T0 >tests/fuzz/found.tar.xz

# Real vLLM with a small cache against the residency index, so many random requests of them.
residency requests="10000": build
    OWNERSERVE_BIN=$PWD/target/ci/ownerserve RESIDENCY_REQUESTS={{requests}} tests/engines/run -s -k residency

# Prompts of random conversations in all committed families, put together and whole, so many conversations.
incremental cases="20000":
    PROPTEST_CASES={{cases}} cargo test --profile ci --locked -p prefix --lib incremental_prompts_equal_whole_ones

# What it costs to know a step's prompt and who holds it, as its context grows.
bench-prefix *options: release
    target/release/bench_prefix {{options}}

# Partitions, kills, full disks and damaged logs under load, in network namespaces; `--quick` does each once.
nemesis *options: build
    target/ci/nemesis {{options}}

# 2,000 idle connections, 500 slow readers, 500 slow heads and the worst bodies at once, beside a tenant that wants to work;
# `--seconds 20` for a short one.
storm *options: build
    OWNERSERVE_BIN=$PWD/target/ci/ownerserve tests/storm/run {{options}}

# Three routers, Redis, workers that come and go and mixed traffic for 20 minutes, or `--seconds N`: what grows levels off.
soak *options: build
    OWNERSERVE_BIN=$PWD/target/ci/ownerserve tests/soak/run {{options}}

# Recorded agent sessions over simulated workers, with a live view.
demo *options:
    cargo run --release -- demo {{options}}
