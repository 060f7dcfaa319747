//! Network namespaces, the veth pairs between them and this one, and rules that drop one direction of a link.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Stdio;

use tokio::process::Command;

use crate::NemesisError;
use crate::history::MemberSlot;

/// This side's address for everything that is no node.
pub(super) const HOST_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 76, 0, 1));

/// Rules that drop must stand before the one that finds local addresses.
const DROP_PRIORITY: &str = "10";

/// The namespace of a node.
pub(super) fn namespace(seat: MemberSlot) -> String {
    format!("node{}", seat.0)
}

/// Makes all namespaces and wires. They are ours alone: the kernel removes them with this process.
pub(super) async fn create_all(seats: u8) -> Result<(), NemesisError> {
    // `ip netns` keeps its names under /run, which in this mount namespace is nobody else's.
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

/// Drops what `from` sends to an address here, without a word to the sender.
pub(super) async fn sever(from: MemberSlot, to: IpAddr) -> Result<(), NemesisError> {
    run(&["ip", "rule", "add", "from", &wire(from), "to", &to.to_string(), "pref", DROP_PRIORITY, "blackhole"]).await
}

/// Lets it through again.
pub(super) async fn restore(from: MemberSlot, to: IpAddr) -> Result<(), NemesisError> {
    run(&["ip", "rule", "del", "from", &wire(from), "to", &to.to_string(), "pref", DROP_PRIORITY, "blackhole"]).await
}

fn wire(seat: MemberSlot) -> String {
    format!("10.77.{}.2", seat.0)
}

/// Runs a command to its end.
pub(super) async fn run(command: &[&str]) -> Result<(), NemesisError> {
    let line = command.join(" ");
    let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output().await;
    let output = output.map_err(NemesisError::system(line.clone()))?;
    if output.status.success() {
        return Ok(());
    }
    let got = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(NemesisError::Answer { who: line, got })
}
