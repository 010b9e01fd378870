//! Other people's code in mizzen: under which licences, from where, and what of it root loads. Without a network: cargo has
//! fetched everything when it builds the tests, or `make test` has.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use mizzen_tests::run_tool;

/// Licences under which mizzen may be given away as it is, with the texts beside it.
const LICENCES: [&str; 9] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "NCSA", // libFuzzer, which is in no product
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

fn cargo(args: &[&str]) -> String {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    run_tool(Command::new(env!("CARGO")).args(args).args(["--offline", "--locked"]).current_dir(repository))
        .expect("everything has been fetched; if not: cargo fetch --locked")
}

fn packages() -> Vec<serde_json::Value> {
    let version = run_tool(Command::new("rustc").arg("-vV")).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    // For this platform alone: nobody has fetched what only Windows needs.
    let platform = format!("--filter-platform={host}");
    let metadata = cargo(&["metadata", "--format-version=1", "--all-features", &platform]);
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Whether an SPDX expression can be fulfilled with [`LICENCES`]. AND binds closer than OR; old crates write OR as a slash.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let allowed = any_of(&mut words);
    assert_eq!(words.next(), None, "not understood: {expression}");
    allowed
}

type Words<'a, 'b> = &'a mut std::iter::Peekable<std::str::SplitWhitespace<'b>>;

fn any_of(words: Words) -> bool {
    let mut allowed = all_of(words);
    while words.next_if_eq(&"OR").is_some() {
        allowed |= all_of(words);
    }
    allowed
}

fn all_of(words: Words) -> bool {
    let mut allowed = one(words);
    while words.next_if_eq(&"AND").is_some() {
        allowed &= one(words);
    }
    allowed
}

fn one(words: Words) -> bool {
    let name = words.next().expect("a licence");
    if name == "(" {
        let allowed = any_of(words);
        assert_eq!(words.next(), Some(")"));
        return allowed;
    }
    match words.next_if_eq(&"WITH") {
        Some(_) => LICENCES.contains(&format!("{name} WITH {}", words.next().unwrap()).as_str()),
        None => LICENCES.contains(&name),
    }
}

#[test]
fn licence_expressions_are_understood() {
    for good in [
        "MIT",
        "GPL-3.0-only OR MIT",
        "MIT/Apache-2.0",
        "(MIT OR GPL-3.0-only) AND ISC",
        "Apache-2.0 WITH LLVM-exception OR X",
        "GPL-2.0-only AND ISC OR MIT",
    ] {
        assert!(is_allowed(good), "{good}");
    }
    for bad in [
        "GPL-3.0-only",
        "MIT AND GPL-3.0-only",
        "MIT WITH Something",
        "(MIT OR ISC) AND GPL-3.0-only",
        "GPL-2.0-only AND (ISC OR MIT)",
    ] {
        assert!(!is_allowed(bad), "{bad}");
    }
}

#[test]
fn every_licence_is_a_permissive_one() {
    for package in packages() {
        // A crate with a licence file of its own has no expression, and would have to be read.
        let licence = package["license"].as_str().unwrap_or("none");
        assert!(is_allowed(licence), "{}: {licence}", package["name"]);
    }
}

#[test]
fn everything_comes_from_crates_io() {
    let packages = packages();
    assert!(packages.iter().any(|package| package["name"] == "libc"), "{packages:?}");
    for package in packages {
        let source = package["source"].as_str();
        let ours = package["name"].as_str().is_some_and(|name| name.contains("mizzen"));
        let registry = |source: &str| source.starts_with("registry+") && source.ends_with("/crates.io-index");
        assert!(if ours { source.is_none() } else { source.is_some_and(registry) }, "{package}");
    }
}

/// SECURITY.md points administrators to this list: a crate more in slurmstepd is a decision, not an accident.
#[test]
fn root_loads_the_crates_of_the_list() {
    let options = ["-p", "spank-mizzen", "-e", "normal,no-proc-macro", "--prefix=none"];
    let tree = cargo(&[&["tree"], options.as_slice()].concat());
    let loaded: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    let list = include_str!("../../spank-plugin/loaded-crates.txt");
    let listed: BTreeSet<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(loaded, listed, "spank-plugin/loaded-crates.txt is not true");
}
