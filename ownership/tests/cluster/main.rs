//! Tests of several nodes in one process, over loopback TCP and a real disk, through the public interface.

mod joining;
mod leases;
mod lost_folders;
mod membership;
mod mixed_releases;
mod nodes;
mod poison_messages;
mod rejected_callers;
mod watches;
mod wire;
mod writes;
