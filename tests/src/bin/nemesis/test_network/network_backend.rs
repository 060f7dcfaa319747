//! Enters namespaces for network, mounts and process ids, which the kernel removes when this program ends, however it
//! ends.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::NemesisError;

/// Environment variable of the program inside, so that it does not enter again.
const INSIDE_ENV: &str = "OWNERSERVE_NEMESIS_INSIDE";
const UNSHARE: [&str; 6] = ["--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"];

/// How the nodes of a run are connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NetworkBackend {
    /// Nodes in network namespaces: partitions drop packets.
    Namespaces,
    /// Nodes on loopback addresses: partitions stall the relay. The result says so.
    Loopback,
}

impl NetworkBackend {
    /// Returns the backend of this process.
    pub(crate) fn current() -> NetworkBackend {
        match std::env::var_os(INSIDE_ENV) {
            Some(_) => NetworkBackend::Namespaces,
            None => NetworkBackend::Loopback,
        }
    }

    /// Name for people and for the report.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            NetworkBackend::Namespaces => "network namespaces",
            NetworkBackend::Loopback => "loopback and relay only",
        }
    }
}

/// Re-executes the program inside namespaces of its own. Returns if it already is inside, or if namespaces are not
/// available, then with the reason.
pub(crate) fn enter_namespaces() -> Result<Option<String>, NemesisError> {
    if NetworkBackend::current() == NetworkBackend::Namespaces {
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

/// Returns why namespaces are not available, after trying everything that will be needed once.
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
