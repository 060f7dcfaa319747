//! The network of an address: connections are limited by it, because one host may have many addresses.

// From `core`, which has addresses and no sockets.
use core::net::IpAddr;

/// Returns the network that counts as one host: an IPv4 address itself (/32), and the /64 of an IPv6 address. An IPv4
/// address mapped into IPv6 counts as IPv4.
pub fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_host_is_its_64_and_an_ipv4_host_its_address() {
        let network = |address: &str| network_of(address.parse().unwrap()).to_string();
        for (address, expected) in [
            ("10.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
            ("2001:db8:1:3::1", "2001:db8:1:3::"),
            ("::1", "::"),
        ] {
            assert_eq!(network(address), expected, "{address}");
        }
    }
}
