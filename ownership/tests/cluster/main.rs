//! Several nodes in one process, over loopback TCP and real disk, from outside.

mod bricks;
mod joining;
mod leases;
mod lost_folders;
mod membership;
mod mixed;
mod nodes;
mod strangers;
mod watching;
mod wire;
mod writing;
