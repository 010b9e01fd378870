//! Names of registries, as `mizzen login` takes them.

use super::*;

#[test]
fn registries_are_named_in_many_ways() {
    for (text, host) in [
        ("nvcr.io", "nvcr.io"),
        ("https://nvcr.io/", "nvcr.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("docker.io", "docker.io"),
        ("docker://ghcr.io", "ghcr.io"),
        ("localhost:5000", "localhost:5000"),
        ("myregistry", "myregistry"),
    ] {
        assert_eq!(registry_host(text).unwrap(), host);
    }
    for text in ["", "a.io/b", "u@a.io", "a b", "a#b", "a.io:99999"] {
        let failure = registry_host(text).unwrap_err();
        assert_eq!(failure.message, format!("\"{text}\" is not the name of a registry"));
    }
}
