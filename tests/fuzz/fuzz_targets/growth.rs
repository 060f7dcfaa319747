//! Hands what libFuzzer makes up to [`targets::growth`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::growth(bytes));
