//! Hands what libFuzzer makes up to [`targets::nodes::connections`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::nodes::connections(bytes));
