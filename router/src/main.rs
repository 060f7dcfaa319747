//! The `ownerserve` binary.

/// A request's memory is often freed by another thread than the one that allocated it. The system's allocator takes a
/// lock for that, on which the threads of the runtime wait for each other.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    router::cli::main()
}
