//! Hands what libFuzzer makes up to [`targets::text::templates`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::text::templates(bytes));
