//! Hands what libFuzzer makes up to [`targets::answers`].

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::answers(bytes));
