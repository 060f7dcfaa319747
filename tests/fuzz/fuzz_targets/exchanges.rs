//! Hands what libFuzzer makes up to [`targets::peers::exchanges`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::peers::exchanges(bytes));
