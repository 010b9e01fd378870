//! From converted layers to an image: replay the layers, take the blocks of what is left, write the tables.
//!
//! Run by: the user, in the importer.

use mizzen_core::Failure;
use mizzen_squashfs::writer::{self, Attributes, Compressors, Content, FileId, Output, Tree, Writer};

use crate::failures::{cannot_write, failure_of};
use crate::layer::Layer;
use crate::replay::{Replay, of_tree};

/// Where the launcher looks for the configuration, in the image.
const DIRECTORY: &[u8] = b".mizzen";
const CONFIG: &[u8] = b"config.json";

/// Why there is no image.
pub enum AssembleError {
    /// This layer is not what was converted; converted again, it will do.
    DamagedLayer(usize),
    /// Anything else.
    Failed(Failure),
}

impl From<Failure> for AssembleError {
    fn from(failure: Failure) -> AssembleError {
        AssembleError::Failed(failure)
    }
}

/// Writes the image of these layers, the lowest first, to an empty file. `config` is kept inside.
pub fn assemble<W: Output>(
    layers: &[Layer],
    config: Option<&[u8]>,
    keep_owners: bool,
    compressors: &Compressors,
    out: W,
) -> Result<W, AssembleError> {
    let mut replay = Replay::new(keep_owners)?;
    for (number, layer) in layers.iter().enumerate() {
        replay.apply(layer).map_err(|failure| failure.about(format!("layer {}", number + 1)))?;
    }
    let (mut tree, count) = replay.finish();
    let mut wanted = vec![false; count];
    for file in tree.files() {
        if let Some(wanted) = wanted.get_mut(file.number()) {
            *wanted = true;
        }
    }
    let mut writer = Writer::with(out, compressors).map_err(of_writer)?;
    let mut taken: Vec<Option<FileId>> = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        let base = taken.len();
        let mut entries = layer.read().map_err(cannot_write)?;
        while entries.next_entry().map_err(cannot_write)?.is_some() {}
        let segment = entries.segment(compressors.options()).map_err(cannot_write)?;
        let is_wanted = |file: FileId| wanted.get(base + file.number()).is_some_and(|wanted| *wanted);
        let ids = writer.add_segment(segment, &mut layer.blocks(), is_wanted);
        let mut ids = ids.map_err(|error| match error {
            writer::Error::Damaged => AssembleError::DamagedLayer(number),
            other => of_writer(other).into(),
        })?;
        if taken.is_empty() { taken = ids } else { taken.append(&mut ids) }
    }
    tree.replace_files(|file| taken.get(file.number()).copied().flatten());
    drop((taken, wanted));
    if let Some(config) = config {
        let file = writer.add_file(config).map_err(of_writer)?;
        add_config(&mut tree, file).map_err(of_tree)?;
    }
    Ok(writer.finish(&tree).map_err(of_writer)?)
}

/// Puts the configuration in its place, whatever the layers have there.
fn add_config(tree: &mut Tree, file: FileId) -> writer::Result<()> {
    let directory = match tree.lookup(Tree::ROOT, DIRECTORY) {
        Some(there) if *tree.content(there)? == Content::Directory => there,
        _ => {
            tree.remove(Tree::ROOT, DIRECTORY);
            let attributes = Attributes { mode: 0o755, ..Attributes::default() };
            tree.add(Tree::ROOT, DIRECTORY, attributes, Content::Directory)?
        }
    };
    tree.remove(directory, CONFIG);
    let attributes = Attributes { mode: 0o644, ..Attributes::default() };
    tree.add(directory, CONFIG, attributes, Content::File(file)).map(|_| ())
}

fn of_writer(error: writer::Error) -> Failure {
    match error {
        writer::Error::Read(error) => failure_of(error),
        writer::Error::Write(error) => cannot_write(error),
        other => Failure::new(other.to_string()),
    }
}
