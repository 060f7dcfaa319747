//! Reads a model's text files, from a folder as published or from memory. The crate's only IO.

use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::PrefixError;

/// Maximum file size. No real tokenizer.json comes near this.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// What to load a [`crate::ModelTokenizer`] from.
#[derive(Clone, Debug)]
pub enum ModelTokenizerSource<'a> {
    /// A model folder as Hugging Face publishes it.
    Folder(PathBuf),
    /// The same files, in memory.
    Files(ModelFiles<'a>),
}

/// Files of a model folder that determine prompts and their token ids. Only `tokenizer_json` is required.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer_json: Cow<'a, [u8]>,
    /// `tokenizer_config.json`: special tokens, and the chat template of older models.
    pub tokenizer_config: Option<Cow<'a, [u8]>>,
    /// `chat_template.jinja`; takes precedence over the template in `tokenizer_config.json`.
    pub chat_template: Option<Cow<'a, [u8]>>,
    /// `special_tokens_map.json`; used only for entries that `tokenizer_config.json` lacks.
    pub special_tokens_map: Option<Cow<'a, [u8]>>,
    /// `config.json`: the model's type and end-of-sequence ids.
    pub config: Option<Cow<'a, [u8]>>,
    /// `generation_config.json`: end-of-sequence ids, with precedence over `config.json`.
    pub generation_config: Option<Cow<'a, [u8]>>,
}

impl<'a> ModelTokenizerSource<'a> {
    pub(crate) fn load_files(self) -> Result<ModelFiles<'a>, PrefixError> {
        match self {
            Self::Files(files) => Ok(files),
            Self::Folder(folder) => ModelFiles::read(&folder),
        }
    }
}

impl ModelFiles<'static> {
    /// Reads a model folder. Files other than `tokenizer.json` may be missing.
    pub fn read(folder: &Path) -> Result<Self, PrefixError> {
        let optional = |name| match read(folder, name) {
            Err(PrefixError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            other => other.map(|bytes| Some(Cow::Owned(bytes))),
        };
        Ok(Self {
            tokenizer_json: Cow::Owned(read(folder, "tokenizer.json")?),
            tokenizer_config: optional("tokenizer_config.json")?,
            chat_template: optional("chat_template.jinja")?,
            special_tokens_map: optional("special_tokens_map.json")?,
            config: optional("config.json")?,
            generation_config: optional("generation_config.json")?,
        })
    }
}

fn read(folder: &Path, file: &'static str) -> Result<Vec<u8>, PrefixError> {
    let path = folder.join(file);
    let failed = |source| PrefixError::Read { path: path.clone(), source };
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(&path).map_err(failed)?;
    opened.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > MAX_FILE_BYTES {
        true => Err(PrefixError::FileTooLarge { file, limit: MAX_FILE_BYTES }),
        false => Ok(bytes),
    }
}
