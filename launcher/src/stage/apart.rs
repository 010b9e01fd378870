//! Makes a copy of a copy in the making, apart from it: what that has comes from there, and the rest from the original. Runs as
//! the user on the host.
//!
//! A process that is stopped, as those of a suspended job are, keeps the locks on the chunks that it was fetching, and may go on
//! at any time. So nobody else writes them: the copy would be another file than the one whose times were noted when it was
//! published. It costs the room of a second copy for as long as the other process lives. Of the copy in the making only what is on
//! disk is taken: nobody may ever sync the rest, and hear that it is lost.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use mizzen_core::Digest;
use mizzen_core::failure::cause;

use super::cache::describe;
use super::copy::{CopyError, copy};
use super::evict;
use super::fill::{Filler, Unfilled};
use super::obtain::publish;
use super::partial::{CHUNK, DURABLE, chunks};
use super::progress_sink::{Activity, ProgressSink};

/// As many chunks are moved at once: a megabyte.
const PIECE: u64 = 8;

/// Makes and publishes the copy.
pub fn copy_apart(filler: &Filler, sink: &mut dyn ProgressSink) -> Result<(File, Digest), Unfilled> {
    let (cache, fetcher) = (filler.cache, filler.fetcher);
    let (partial, size) = (&fetcher.partial, fetcher.partial.size);
    let unwritten = |why: String| Unfilled::Cache(format!("{}: {why}", cache.path.display()));
    // What was written and never synced may be lost, whatever the page cache says, and only this tells.
    filler.sync();
    if let Some(why) = fetcher.stopped() {
        return Err(why.into());
    }
    let room = evict::reserve(cache, size, 0, filler.limits).map_err(Unfilled::Cache)?;
    let unfinished = cache.begin(size).map_err(|errno| unwritten(describe(errno)))?;
    drop(room);
    let count = chunks(size);
    for first in (0..count).step_by(PIECE as usize) {
        let mut chunk = first;
        let marks = partial.marks(first..(first + PIECE).min(count));
        for run in marks
            .map_err(|error| unwritten(cause(&error)))?
            .chunk_by(|one, next| (*one == DURABLE) == (*next == DURABLE))
        {
            let (begin, end) = (chunk * CHUNK, ((chunk + run.len() as u64) * CHUNK).min(size));
            chunk += run.len() as u64;
            let mut content = vec![0; (end - begin) as usize];
            if run.first() == Some(&DURABLE) {
                partial.data.read_exact_at(&mut content, begin).map_err(|error| unwritten(cause(&error)))?;
            } else {
                fetcher.original.read_exact_at(&mut content, begin).map_err(Unfilled::Source)?;
            }
            unfinished.file.write_all_at(&content, begin).map_err(|error| unwritten(cause(&error)))?;
            sink.advance(Activity::Copying, end, size);
        }
    }
    let mut done = 0;
    let digest = copy(&unfinished.file, None, size, &mut |bytes| {
        done += bytes;
        sink.advance(Activity::Verifying, done, size);
    });
    let digest = digest.map_err(|error| {
        let error = match error {
            CopyError::Source(error) | CopyError::Target(error) => error,
            CopyError::Shorter => io::ErrorKind::UnexpectedEof.into(),
        };
        unwritten(cause(&error))
    })?;
    // Looked at when everything was read.
    if let Some(why) = fetcher.stopped() {
        return Err(why.into());
    }
    if !fetcher.is_unchanged() {
        return Err(Unfilled::Changed);
    }
    let published = publish(cache, filler.source, unfinished, digest, sink)
        .map_err(|errno| unwritten(describe(errno)))?;
    partial.remove(cache);
    Ok((published, digest))
}
