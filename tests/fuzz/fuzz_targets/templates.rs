//! Hands what libFuzzer makes up to [`targets::text::templates`].

#![no_main]

// What is loaded with the first input is no part of what an input may take.
libfuzzer_sys::fuzz_target!(init: targets::text::templates(b""), |bytes: &[u8]| targets::text::templates(bytes));
