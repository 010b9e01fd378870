//! What can be said about copies of images on the node: when they are made, and how much room they may take.

use serde::Deserialize;

use crate::Failure;
use crate::failure::quote;

/// Tells the nodes of a step which files srun has sent them, as JSON, or why there can be no container. Between srun and
/// the launcher alone: no program of the step sees it.
pub const BROADCAST_VARIABLE: &str = "SLURM_MIZZEN_BROADCAST";

/// The name under which srun starts the launcher to send an image to the nodes of a step.
pub const BROADCASTER: &str = "mizzen-broadcast";

/// No part of a failure on its way between srun, the launcher and the nodes is longer.
pub const FAILURE_LIMIT: usize = 4096;

/// Begins the variable where srun has found that there can be no container; what it tells otherwise is a list.
const REFUSAL: &str = "!";

/// The failure on its way from srun to the nodes, whose message it becomes.
pub fn encode_refusal(failure: &Failure) -> String {
    format!("{REFUSAL}{}", failure.encode())
}

/// Reads it back, if it is one.
pub fn decode_refusal(variable: &[u8]) -> Option<Failure> {
    let text = variable.strip_prefix(REFUSAL.as_bytes())?;
    Some(Failure::decode(text, FAILURE_LIMIT))
}

/// When an image is copied to the node before it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// When it lies on a network file system.
    #[default]
    Auto,
    /// Always, but for directories.
    Always,
    /// Never.
    Never,
    /// Always, and for a step of several nodes srun reads it once and sends it to them all. A matter of the job, not of
    /// the site: mizzen.toml does not know it.
    #[serde(skip)]
    Broadcast,
}

impl Policy {
    const ALL: [Policy; 4] = [Policy::Auto, Policy::Always, Policy::Never, Policy::Broadcast];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Auto => "auto",
            Policy::Always => "always",
            Policy::Never => "never",
            Policy::Broadcast => "bcast",
        }
    }

    /// Reads the word.
    pub fn parse(text: &[u8]) -> Result<Policy, Failure> {
        let found = Policy::ALL.into_iter().find(|policy| policy.name().as_bytes() == text);
        found.ok_or_else(|| Failure::new(format!("\"{}\" is not auto, always, never or bcast", quote(text))))
    }
}

/// When a copy that is there is read as a whole, and its digest compared, before it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Never: its inode tells whether anybody has written to it, but not what a disk has lost.
    Never,
    /// When the user asks for an image by its digest.
    #[default]
    Pinned,
    /// At every start.
    Always,
}

/// When the tasks of a step start to whose nodes srun sends a large image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Broadcast {
    /// When all of it has arrived.
    #[default]
    First,
    /// At once: they read the original until then.
    Early,
}

/// An amount of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Bytes(u64),
    /// A part of the file system.
    Percent(u64),
}

impl Amount {
    /// Reads `100g` or `10%`; nothing at all is no limit.
    pub fn parse(text: &str) -> Result<Option<Amount>, Failure> {
        if text.is_empty() {
            return Ok(None);
        }
        let bad = || {
            Failure::new(format!("\"{}\" is not an amount of storage", quote(text.as_bytes()))).hint(
                "write a number with k, m, g or t behind it, or a percentage of the file system: 100g, 10%",
            )
        };
        let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let number: u64 = text[..text.len() - unit.len()].parse().map_err(|_| bad())?;
        let shift = match unit {
            "%" if number <= 100 => return Ok(Some(Amount::Percent(number))),
            "" => 0,
            "k" | "K" => 10,
            "m" | "M" => 20,
            "g" | "G" => 30,
            "t" | "T" => 40,
            _ => return Err(bad()),
        };
        number.checked_mul(1 << shift).map(|bytes| Some(Amount::Bytes(bytes))).ok_or_else(bad)
    }

    /// In bytes, on a file system of this size.
    pub fn of(self, file_system: u64) -> u64 {
        match self {
            Amount::Bytes(bytes) => bytes,
            Amount::Percent(percent) => (u128::from(file_system) * u128::from(percent) / 100) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read() {
        assert_eq!(Amount::parse(""), Ok(None));
        assert_eq!(Amount::parse("2g"), Ok(Some(Amount::Bytes(2 << 30))));
        assert_eq!(Amount::parse("0"), Ok(Some(Amount::Bytes(0))));
        assert_eq!(Amount::parse("10%").unwrap().unwrap().of(u64::MAX), u64::MAX / 10);
        for text in ["g", "-1", "101%", "1gg", "10Q", "99999999t", " 1g", "1.5g", "%"] {
            assert!(Amount::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn refusals_survive_their_text() {
        for failure in [Failure::new("no such image"), Failure::new("é: broken").hint("copy it again")] {
            assert_eq!(decode_refusal(encode_refusal(&failure).as_bytes()), Some(failure));
        }
        assert_eq!(decode_refusal(b"[]"), None);
        assert_eq!(decode_refusal(b""), None);
    }

    #[test]
    fn policies_survive_their_text() {
        for policy in Policy::ALL {
            assert_eq!(Policy::parse(policy.name().as_bytes()), Ok(policy));
        }
        assert!(Policy::parse(b"sometimes").unwrap_err().message.contains("\"sometimes\" is not auto"));
    }
}
