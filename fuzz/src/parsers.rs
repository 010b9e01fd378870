//! The parsers under libFuzzer. The variable FUZZ names one of them; the arguments are libFuzzer's.
#![no_main]
#![allow(clippy::print_stderr)] // a tool for developers

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

mod targets;

static PARSER: LazyLock<fn(&[u8]) -> bool> = LazyLock::new(|| {
    let wanted = std::env::var("FUZZ").unwrap_or_default();
    let Some((_, parser)) = targets::all().find(|(name, _)| *name == wanted) else {
        let names: Vec<&str> = targets::all().map(|(name, _)| name).collect();
        eprintln!("FUZZ={wanted:?} is no parser; there are {}", names.join(", "));
        std::process::exit(2);
    };
    parser
});

fuzz_target!(|bytes: &[u8]| {
    PARSER(bytes);
});
