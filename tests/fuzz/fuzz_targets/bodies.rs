//! Hands what libFuzzer makes up to [`targets::bodies`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::bodies(bytes));
