//! Network namespaces, the veth pairs to this one, and rules that drop one direction of a link.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Stdio;

use tokio::process::Command;

use crate::NemesisError;
use crate::history::MemberSlot;

/// Address on this side for everything except nodes.
pub(super) const HOST_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 76, 0, 1));

/// Drop rules must precede the rule that matches local addresses.
const DROP_PRIORITY: &str = "10";

/// Name of a node's namespace.
pub(super) fn namespace(slot: MemberSlot) -> String {
    format!("node{}", slot.0)
}

/// Creates all namespaces and links. They are private: the kernel removes them with this process.
pub(super) async fn create_all(seats: u8) -> Result<(), NemesisError> {
    // `ip netns` keeps its names under /run, which is private in this mount namespace.
    run(&["mount", "-t", "tmpfs", "tmpfs", "/run"]).await?;
    run(&["ip", "link", "set", "lo", "up"]).await?;
    run(&["ip", "addr", "add", &format!("{HOST_ADDRESS}/32"), "dev", "lo"]).await?;
    run(&["ip", "rule", "add", "pref", "100", "lookup", "local"]).await?;
    run(&["ip", "rule", "del", "pref", "0"]).await?;
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(NemesisError::system("forward between wires"))?;
    for seat in (1..=seats).map(MemberSlot) {
        let (name, link, subnet) = (namespace(seat), format!("wire{}", seat.0), seat.0);
        let (here, there) = (format!("10.77.{subnet}.1"), format!("10.77.{subnet}.2/24"));
        run(&["ip", "netns", "add", &name]).await?;
        run(&["ip", "link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &name]).await?;
        run(&["ip", "addr", "add", &format!("{here}/24"), "dev", &link]).await?;
        run(&["ip", "link", "set", &link, "up"]).await?;
        run(&["ip", "addr", "add", &format!("10.78.{subnet}.1/32"), "dev", "lo"]).await?;
        run(&["ip", "-n", &name, "addr", "add", &there, "dev", "eth0"]).await?;
        run(&["ip", "-n", &name, "link", "set", "eth0", "up"]).await?;
        run(&["ip", "-n", &name, "link", "set", "lo", "up"]).await?;
        run(&["ip", "-n", &name, "route", "add", "default", "via", &here]).await?;
    }
    Ok(())
}

/// Silently drops traffic from `from` to an address on this side.
pub(super) async fn sever(from: MemberSlot, to: IpAddr) -> Result<(), NemesisError> {
    run(&["ip", "rule", "add", "from", &wire(from), "to", &to.to_string(), "pref", DROP_PRIORITY, "blackhole"]).await
}

/// Removes the drop rule.
pub(super) async fn restore(from: MemberSlot, to: IpAddr) -> Result<(), NemesisError> {
    run(&["ip", "rule", "del", "from", &wire(from), "to", &to.to_string(), "pref", DROP_PRIORITY, "blackhole"]).await
}

fn wire(slot: MemberSlot) -> String {
    format!("10.77.{}.2", slot.0)
}

/// Runs a command to completion.
pub(super) async fn run(command: &[&str]) -> Result<(), NemesisError> {
    let line = command.join(" ");
    let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output().await;
    let output = output.map_err(NemesisError::system(line.clone()))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(NemesisError::Answer { who: line, got: text })
}
