//! What machine an image is for: `OS/ARCHITECTURE[/VARIANT]`, in the words of Go, which registries use.
//!
//! Run by: the user, in the importer.

use std::fmt;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use serde::Deserialize;

/// What an image is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct Platform {
    /// `linux`, and hardly anything else.
    pub os: String,
    /// `amd64`, `arm64`, `ppc64le`, …
    pub architecture: String,
    /// `v8` of `arm64/v8`; empty where none is told.
    pub variant: String,
}

/// The names that machines call themselves by (`uname -m`), and the names in registries.
const MACHINES: [(&str, &str); 7] = [
    ("x86_64", "amd64"),
    ("aarch64", "arm64"),
    ("x86", "386"),
    ("i386", "386"),
    ("i686", "386"),
    ("powerpc64", "ppc64le"),
    ("loongarch64", "loong64"),
];

impl Platform {
    /// This machine's.
    pub fn host() -> Platform {
        Platform::linux(std::env::consts::ARCH)
    }

    fn linux(machine: &str) -> Platform {
        let known = MACHINES.iter().find(|(name, _)| *name == machine);
        let architecture = known.map_or(machine, |(_, architecture)| architecture).to_owned();
        Platform { os: "linux".to_owned(), architecture, variant: String::new() }
    }

    /// Reads `linux/arm64/v8`, `linux/amd64`, or an architecture alone.
    pub fn parse(text: &str) -> Result<Platform, Failure> {
        let good = |part: &&str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        let parts: Vec<&str> = text.split('/').collect();
        if parts.len() > 3 || !parts.iter().all(good) {
            return Err(Failure::new(format!("\"{}\" is not a platform", quote(text.as_bytes())))
                .hint("write OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT, for example linux/arm64"));
        }
        Ok(match parts.as_slice() {
            [architecture] => Platform::linux(architecture),
            [os, architecture] => Platform { os: (*os).to_owned(), ..Platform::linux(architecture) },
            [os, architecture, variant, ..] => Platform {
                os: (*os).to_owned(),
                variant: (*variant).to_owned(),
                ..Platform::linux(architecture)
            },
            [] => Platform::default(),
        })
    }

    /// Whether nobody knows: buildkit marks what is no image in this way.
    pub fn is_unknown(&self) -> bool {
        self.os == "unknown" && self.architecture == "unknown"
    }

    /// How well an image for `offered` suits: the lower the better, none if it does not run there.
    pub fn rank(&self, offered: &Platform) -> Option<u32> {
        if (&self.os, &self.architecture) != (&offered.os, &offered.architecture) {
            return None;
        }
        // What a machine without a variant is, and an image without one needs.
        let (usual, least) = match self.architecture.as_str() {
            "arm64" => ("v8", "v8"),
            // An image without a variant may be any; the machines that still exist are v7.
            "arm" => ("v7", "v5"),
            "amd64" => ("v1", "v1"),
            _ => ("", ""),
        };
        let or = |variant: &str, other: &str| if variant.is_empty() { other } else { variant }.to_owned();
        let (wanted, has) = (or(&self.variant, usual), or(&offered.variant, least));
        if wanted == has {
            return Some(0);
        }
        // Later levels run what was made for earlier ones.
        let (wanted, has) = (level(&wanted)?, level(&has)?);
        (has < wanted).then(|| wanted - has)
    }
}

/// `v8.2` as a number.
fn level(variant: &str) -> Option<u32> {
    let (level, part) = variant.strip_prefix('v')?.split_once('.').unwrap_or((&variant[1..], "0"));
    Some(u32::from(level.parse::<u8>().ok()?) * 256 + u32::from(part.parse::<u8>().ok()?))
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", quote(self.os.as_bytes()), quote(self.architecture.as_bytes()))?;
        if self.variant.is_empty() { Ok(()) } else { write!(f, "/{}", quote(self.variant.as_bytes())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_are_read_and_written() {
        for (text, whole) in [
            ("linux/amd64", "linux/amd64"),
            ("linux/arm64/v8", "linux/arm64/v8"),
            ("arm64", "linux/arm64"),
            ("linux/x86_64", "linux/amd64"),
            ("aarch64", "linux/arm64"),
            ("ppc64le", "linux/ppc64le"),
        ] {
            assert_eq!(Platform::parse(text).unwrap().to_string(), whole);
        }
        for text in ["", "linux/", "/amd64", "a/b/c/d", "linux/am d64", "linux/\n"] {
            let failure = Platform::parse(text).unwrap_err();
            assert!(failure.message.ends_with("is not a platform"), "{failure}");
        }
        let host = Platform::host();
        assert_eq!(host.os, "linux");
        #[cfg(target_arch = "x86_64")]
        assert_eq!(host.architecture, "amd64");
    }

    #[test]
    fn later_machines_run_what_was_made_for_earlier_ones() {
        let rank = |wanted: &str, offered: &str| {
            Platform::parse(wanted).unwrap().rank(&Platform::parse(offered).unwrap())
        };
        for (wanted, offered, good) in [
            ("arm64", "arm64/v8", true),
            ("arm64/v8", "arm64", true),
            ("arm64", "arm64/v9", false),
            ("arm64/v9", "arm64", true),
            ("arm64/v9", "arm64/v8.2", true),
            ("arm64/v8.1", "arm64/v8.2", false),
            ("arm64/v9", "arm64/vnan", false),
            ("arm/v7", "arm/v6", true),
            ("arm", "arm/v7", true),
            ("arm/v6", "arm/v7", false),
            ("arm/v6", "arm", true),
            ("arm64", "arm/v7", false),
            ("amd64", "amd64/v2", false),
            ("amd64/v3", "amd64", true),
            ("windows/amd64", "linux/amd64", false),
            ("s390x", "s390x", true),
            ("riscv64/rva23", "riscv64", false),
        ] {
            let wanted = if wanted.contains("s/") { wanted.to_owned() } else { format!("linux/{wanted}") };
            let offered =
                if offered.contains("x/") { offered.to_owned() } else { format!("linux/{offered}") };
            assert_eq!(rank(&wanted, &offered).is_some(), good, "{wanted} {offered}");
        }
        assert!(rank("linux/arm/v7", "linux/arm/v7") < rank("linux/arm/v7", "linux/arm/v6"));
        assert!(rank("linux/arm/v7", "linux/arm/v6") < rank("linux/arm/v7", "linux/arm/v5"));
    }
}
