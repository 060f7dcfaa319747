//! Entering namespaces of our own: network, mounts and process ids, which the kernel takes apart when this program ends,
//! however it ends.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::NemesisError;

/// Set for the program inside, so that it does not enter again.
const INSIDE_ENV: &str = "OWNERSERVE_NEMESIS_INSIDE";
const UNSHARE: [&str; 6] = ["--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"];

/// What a run stands on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NetworkIsolation {
    /// Nodes in network namespaces: partitions are dropped packets.
    Namespaces,
    /// Nodes on loopback addresses: partitions are a relay that stands still. Said in the result.
    Loopback,
}

impl NetworkIsolation {
    /// Where this process is.
    pub(crate) fn current() -> NetworkIsolation {
        match std::env::var_os(INSIDE_ENV) {
            Some(_) => NetworkIsolation::Namespaces,
            None => NetworkIsolation::Loopback,
        }
    }

    /// For people and for the report.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            NetworkIsolation::Namespaces => "network namespaces",
            NetworkIsolation::Loopback => "loopback and relay only",
        }
    }
}

/// Becomes the same program inside namespaces of its own. Returns where that is so already, or cannot be had: then with
/// the reason.
pub(crate) fn enter_namespaces() -> Result<Option<String>, NemesisError> {
    if NetworkIsolation::current() == NetworkIsolation::Namespaces {
        return Ok(None);
    }
    if let Some(why) = missing_namespaces() {
        return Ok(Some(why));
    }
    let own = std::env::current_exe().map_err(NemesisError::system("find this program"))?;
    let error =
        Command::new("unshare").args(UNSHARE).arg(own).args(std::env::args_os().skip(1)).env(INSIDE_ENV, "1").exec();
    Err(NemesisError::system("enter namespaces")(error))
}

/// Why namespaces cannot be had: everything that will be needed is tried once.
fn missing_namespaces() -> Option<String> {
    let trial = "mount -t tmpfs tmpfs /run && ip netns add trial && ip link add wire1 type veth peer name eth0 netns trial \
                 && ip rule add from 10.77.1.2 to 10.78.2.1 pref 10 blackhole";
    let tried = Command::new("unshare").args(UNSHARE).args(["sh", "-c", trial]).stdin(Stdio::null()).output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}
