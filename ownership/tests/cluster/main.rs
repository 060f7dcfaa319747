//! Several nodes in one process, over loopback TCP and real disk, from outside.

mod membership;
mod nodes;
mod writing;
