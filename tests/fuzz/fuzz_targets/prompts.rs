//! Hands what libFuzzer makes up to [`targets::text::prompts`].

#![no_main]

// What is loaded with the first input is no part of what an input may take.
libfuzzer_sys::fuzz_target!(init: targets::text::prompts(b""), |bytes: &[u8]| targets::text::prompts(bytes));
