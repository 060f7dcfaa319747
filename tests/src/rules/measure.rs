//! Measures of one source file, without its test code.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::{RepositoryError, SourceFile};

/// Everything that STYLE.md measures per file.
#[derive(Default, Debug)]
pub struct FileMeasures {
    /// Lines without test items.
    pub lines: usize,
    /// Lines of test items, or of the whole file if it is test code.
    pub test_lines: usize,
    /// Functions with more than one `bool` parameter.
    pub multi_bool_functions: Vec<String>,
    /// Types with vague names, and functions named `process`.
    pub vague_names: Vec<String>,
    /// `Result<_, String>` in a signature or a type.
    pub string_errors: usize,
    /// Attributes that suppress a lint and give no reason.
    pub unexplained_attributes: Vec<String>,
    /// Paths to the clock, the file system, the network or threads.
    pub effects: Vec<String>,
}

const VAGUE: [&str; 6] = ["Manager", "Helper", "Util", "Info", "Data", "Context"];
const EFFECTFUL_PATHS: [&str; 8] =
    ["Instant::now", "SystemTime", "std::fs", "std::net", "std::thread", "std::env", "std::process", "std::io::std"];

/// Measures one file.
pub fn measure(source: &SourceFile) -> Result<FileMeasures, RepositoryError> {
    let file = syn::parse_file(&source.text)
        .map_err(|error| RepositoryError::Rust { path: source.path.clone(), source: error })?;
    let total = source.text.lines().count();
    if source.is_test() {
        return Ok(FileMeasures { test_lines: total, ..FileMeasures::default() });
    }
    let mut reader = MeasureVisitor::default();
    reader.visit_file(&file);
    let mut measures = reader.found;
    measures.lines = total - measures.test_lines;
    Ok(measures)
}

#[derive(Default)]
struct MeasureVisitor {
    found: FileMeasures,
    owner: Option<String>,
    foreign_trait: bool,
}

impl MeasureVisitor {
    fn function(&mut self, signature: &syn::Signature) {
        let name = match &self.owner {
            Some(owner) => format!("{owner}::{}", signature.ident),
            None => signature.ident.to_string(),
        };
        if signature.ident.to_string().starts_with("process_") {
            self.found.vague_names.push(name.clone());
        }
        let is_flag = |input: &&syn::FnArg| matches!(input, syn::FnArg::Typed(typed) if is_bool(&typed.ty));
        // Signatures of trait implementations are decided by the trait.
        if !self.foreign_trait && signature.inputs.iter().filter(is_flag).count() > 1 {
            self.found.multi_bool_functions.push(name);
        }
    }

    fn check_name(&mut self, ident: &syn::Ident) {
        let name = ident.to_string();
        if VAGUE.iter().any(|word| words(&name).last() == Some(*word)) {
            self.found.vague_names.push(name);
        }
    }

    fn attributes(&mut self, attributes: &[syn::Attribute]) {
        for attribute in attributes {
            let hides = attribute.path().is_ident("allow") || attribute.path().is_ident("ignore");
            let text = match &attribute.meta {
                syn::Meta::Path(_) => String::new(),
                syn::Meta::List(list) => list.tokens.to_string(),
                syn::Meta::NameValue(_) => "reason".into(),
            };
            if hides && (!text.contains("reason") || text.contains("dead_code")) {
                let line = attribute.span().start().line;
                self.found.unexplained_attributes.push(format!("line {line}: {text}"));
            }
        }
    }
}

fn words(name: &str) -> impl Iterator<Item = &str> {
    let starts: Vec<usize> =
        name.char_indices().filter(|(_, letter)| letter.is_uppercase()).map(|(at, _)| at).collect();
    let ends: Vec<usize> = starts.iter().copied().skip(1).chain([name.len()]).collect();
    starts.into_iter().zip(ends).map(move |(start, end)| &name[start..end])
}

fn is_bool(ty: &syn::Type) -> bool {
    matches!(ty, syn::Type::Path(path) if path.path.is_ident("bool"))
}

/// Returns whether an item is compiled for tests alone.
pub(super) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && matches!(&attribute.meta, syn::Meta::List(list) if list.tokens.to_string() == "test")
    })
}

fn joined(path: &syn::Path) -> String {
    let parts: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    parts.join("::")
}

fn flatten_use_tree(prefix: &str, tree: &syn::UseTree, into: &mut Vec<String>) {
    let join = |name: &syn::Ident| if prefix.is_empty() { name.to_string() } else { format!("{prefix}::{name}") };
    match tree {
        syn::UseTree::Path(path) => flatten_use_tree(&join(&path.ident), &path.tree, into),
        syn::UseTree::Name(name) => into.push(join(&name.ident)),
        syn::UseTree::Rename(rename) => into.push(join(&rename.ident)),
        syn::UseTree::Glob(_) => into.push(format!("{prefix}::*")),
        syn::UseTree::Group(group) => group.items.iter().for_each(|item| flatten_use_tree(prefix, item, into)),
    }
}

impl<'ast> Visit<'ast> for MeasureVisitor {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let (attributes, span) = match item {
            syn::Item::Mod(module) => (&module.attrs, module.span()),
            syn::Item::Fn(function) => (&function.attrs, function.span()),
            syn::Item::Impl(implementation) => (&implementation.attrs, implementation.span()),
            syn::Item::Use(import) => (&import.attrs, import.span()),
            _ => return visit::visit_item(self, item),
        };
        if is_test_only(attributes) {
            self.found.test_lines += span.end().line + 1 - span.start().line;
        } else {
            visit::visit_item(self, item);
        }
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        self.attributes(std::slice::from_ref(attribute));
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig);
        visit::visit_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let before = (self.owner.take(), self.foreign_trait);
        self.owner = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
            _ => None,
        };
        self.foreign_trait = item.trait_.is_some();
        visit::visit_item_impl(self, item);
        (self.owner, self.foreign_trait) = before;
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.check_name(&item.ident);
        let before = self.owner.replace(item.ident.to_string());
        visit::visit_item_trait(self, item);
        self.owner = before;
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.function(&item.sig);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.check_name(&item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.check_name(&item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_type_path(&mut self, path: &'ast syn::TypePath) {
        if let Some(last) = path.path.segments.last().filter(|last| last.ident == "Result")
            && let syn::PathArguments::AngleBracketed(arguments) = &last.arguments
            && let Some(syn::GenericArgument::Type(syn::Type::Path(error))) = arguments.args.iter().nth(1)
            && error.path.is_ident("String")
        {
            self.found.string_errors += 1;
        }
        visit::visit_type_path(self, path);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let text = joined(path);
        if EFFECTFUL_PATHS.iter().any(|effect| text.contains(effect)) {
            self.found.effects.push(format!("line {}: {text}", path.span().start().line));
        }
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut imports = Vec::new();
        flatten_use_tree("", &item.tree, &mut imports);
        imports.retain(|import| EFFECTFUL_PATHS.iter().any(|effect| import.contains(effect)));
        self.found.effects.extend(imports);
        visit::visit_item_use(self, item);
    }
}

/// Names of all types and traits that a file defines, those of its tests and function bodies included.
pub fn type_names(source: &SourceFile) -> Result<Vec<String>, RepositoryError> {
    let file = syn::parse_file(&source.text)
        .map_err(|error| RepositoryError::Rust { path: source.path.clone(), source: error })?;
    let mut names = TypeNameVisitor::default();
    names.visit_file(&file);
    Ok(names.0)
}

#[derive(Default)]
struct TypeNameVisitor(Vec<String>);

impl<'ast> Visit<'ast> for TypeNameVisitor {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let name = match item {
            syn::Item::Struct(item) => Some(&item.ident),
            syn::Item::Enum(item) => Some(&item.ident),
            syn::Item::Union(item) => Some(&item.ident),
            syn::Item::Trait(item) => Some(&item.ident),
            syn::Item::Type(item) => Some(&item.ident),
            _ => None,
        };
        self.0.extend(name.map(ToString::to_string));
        visit::visit_item(self, item);
    }
}
