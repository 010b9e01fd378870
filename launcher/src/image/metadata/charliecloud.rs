//! Images made by Charliecloud: /ch/environment and /ch/metadata.json. Runs as the user on the host.

use std::collections::BTreeMap;

use mizzen_core::Failure;
use serde::Deserialize;
use serde_json::Value;

use super::variables::{Job, Variables, lines, split};
use super::{Architecture, Maker, Metadata, Tree, file, json, labels};

pub const ENVIRONMENT: &str = "/ch/environment";
pub const METADATA: &str = "/ch/metadata.json";

/// What ch-image keeps of an image's configuration. `shell` is for its RUN instruction, not for us.
#[derive(Default, Deserialize)]
struct Document {
    arch: Option<String>,
    cwd: Option<String>,
    env: Option<BTreeMap<String, String>>,
    labels: Option<BTreeMap<String, Value>>,
}

pub fn read(tree: &dyn Tree, job: Job) -> Result<Metadata, Failure> {
    let document: Document = match file(tree, METADATA)? {
        Some(content) => json(METADATA, &content)?,
        None => Document::default(),
    };
    let mut metadata = Metadata::new(Maker::Charliecloud);
    let mut variables = Variables::new(job);
    match file(tree, ENVIRONMENT)? {
        Some(content) => {
            for (place, line) in lines(ENVIRONMENT, &content) {
                let line = expand(line, &variables);
                variables.set_text(&line, || place)?;
            }
        }
        None => {
            for (name, value) in document.env.unwrap_or_default() {
                let text = format!("{name}={value}");
                variables.set_text(text.as_bytes(), || format!("{METADATA}:env"))?;
            }
        }
    }
    metadata.set_variables(variables);
    metadata.set_workdir(document.cwd.unwrap_or_default().as_bytes());
    metadata.labels = labels(document.labels);
    metadata.architecture = document.arch.as_deref().and_then(Architecture::from_oci);
    Ok(metadata)
}

/// As `ch-run --set-env` reads a line: one pair of single quotes around the value goes away; the value is a
/// list of items between colons, and an item `$NAME` is replaced by that variable, or left out with its colon
/// if the variable is empty or not set. No comments, no escapes.
fn expand(line: &[u8], variables: &Variables) -> Vec<u8> {
    let Some((name, value)) = split(line) else { return line.to_vec() };
    let quoted = value.strip_prefix(b"'").and_then(|rest| rest.strip_suffix(b"'"));
    let items = quoted.unwrap_or(value).split(|byte| *byte == b':').filter_map(|item| match item {
        [b'$', wanted @ ..] if !wanted.is_empty() => variables.get(wanted).filter(|value| !value.is_empty()),
        _ => Some(item.to_vec()),
    });
    let value = items.collect::<Vec<_>>().join(&b':');
    [name, b"=", &value].concat()
}
