//! Hands what libFuzzer makes up to [`targets::peers::values`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::peers::values(bytes));
