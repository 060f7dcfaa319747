//! Hands what libFuzzer makes up to [`targets::text::prompts`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::text::prompts(bytes));
