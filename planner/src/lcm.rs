//! Least common multiple.

/// Returns the least common multiple of two block sizes in tokens, saturating; an unknown size (0) is ignored.
pub fn lcm(a: u64, b: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    // Fast path: almost every block size is a power of two, and this runs for every target of a step.
    if a == b || (a.is_power_of_two() && b.is_power_of_two()) {
        return a.max(b);
    }
    if a == 0 || b == 0 { a.max(b) } else { (a / gcd(a, b)).saturating_mul(b) }
}

#[cfg(test)]
mod tests {
    use super::lcm;

    #[test]
    fn lcm_ignores_unknown_blocks_and_saturates() {
        assert_eq!([lcm(16, 24), lcm(16, 0), lcm(0, 16), lcm(0, 0)], [48, 16, 16, 0]);
        assert_eq!([lcm(16, 4), lcm(1, 128), lcm(3, 3), lcm(3, 4)], [16, 128, 3, 12]);
        assert_eq!(lcm(u64::MAX, u64::MAX - 1), u64::MAX);
    }
}
