//! Hands what libFuzzer makes up to [`targets::events`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::events(bytes));
