//! Graph of a crate's files: file A has an arrow to file B if A's code without tests names an item that B defines.
//!
//! A name is followed through imports and re-exports to the file that defines it. A re-export alone is no arrow: it
//! becomes one where the file itself uses the name. Methods are not followed, as they are called without a path.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::{RepositoryError, SourceFile, is_test_only};

/// Files of one crate and the arrows between them.
#[derive(Default)]
pub struct ImportGraph {
    /// Files that each file uses, with the paths that name something there.
    arrows: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
}

/// One file that uses another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportArrow {
    /// The file that uses.
    pub from: String,
    /// The file that is used.
    pub to: String,
    /// Paths in `from` that name something in `to`.
    pub names: BTreeSet<String>,
}

impl std::fmt::Display for ImportArrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        write!(f, "{} -> {} ({})", self.from, self.to, names.join(", "))
    }
}

impl ImportGraph {
    /// Reads the files that are reached from `roots`, the root files of a crate's library and binaries.
    ///
    /// Returns an error if a file is missing or does not parse.
    pub fn read(roots: &[String], sources: &[SourceFile]) -> Result<ImportGraph, RepositoryError> {
        let by_path: BTreeMap<&str, &SourceFile> =
            sources.iter().map(|source| (source.path.as_str(), source)).collect();
        let mut graph = ImportGraph::default();
        for root in roots {
            let mut tree = ModuleTree::default();
            tree.read_file(None, root, &by_path)?;
            for module in 0..tree.modules.len() {
                tree.add_arrows(module, &mut graph);
            }
        }
        Ok(graph)
    }

    /// Number of files.
    pub fn files(&self) -> usize {
        self.arrows.len()
    }

    /// Sets of two or more files that all reach each other, the largest first.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            self.arrows.keys().map(|file| (file.as_str(), self.reached_from(file))).collect();
        let mut circles = BTreeSet::new();
        for (file, targets) in &reached {
            let circle: Vec<String> =
                targets.iter().filter(|other| reached[*other].contains(file)).map(ToString::to_string).collect();
            if circle.len() > 1 {
                circles.insert(circle);
            }
        }
        let mut circles: Vec<Vec<String>> = circles.into_iter().collect();
        circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        circles
    }

    /// Arrows of one shortest cycle through files of `circle`, in the order of the walk.
    pub fn shortest_cycle(&self, circle: &[String]) -> Vec<ImportArrow> {
        let cycles = circle.iter().map(|start| self.cycle_through(start));
        cycles.filter(|cycle| !cycle.is_empty()).min_by_key(Vec::len).unwrap_or_default()
    }

    /// All arrows between files of `circle`.
    pub fn arrows_within(&self, circle: &[String]) -> Vec<ImportArrow> {
        let pairs = circle.iter().flat_map(|from| circle.iter().map(move |to| (from, to)));
        pairs.filter_map(|(from, to)| self.arrow(from, to)).collect()
    }

    fn arrow(&self, from: &str, to: &str) -> Option<ImportArrow> {
        let names = self.arrows.get(from)?.get(to)?.clone();
        Some(ImportArrow { from: from.to_owned(), to: to.to_owned(), names })
    }

    fn targets(&self, file: &str) -> impl Iterator<Item = &str> {
        self.arrows.get(file).into_iter().flat_map(|targets| targets.keys().map(String::as_str))
    }

    fn reached_from(&self, file: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&str> = self.targets(file).collect();
        while let Some(next) = open.pop() {
            if reached.insert(next) {
                open.extend(self.targets(next));
            }
        }
        reached
    }

    fn cycle_through(&self, start: &str) -> Vec<ImportArrow> {
        let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut open = VecDeque::from([start]);
        while let Some(file) = open.pop_front() {
            for target in self.targets(file) {
                if target == start {
                    return self.walk_back(start, file, &came_from);
                }
                if !came_from.contains_key(target) {
                    came_from.insert(target, file);
                    open.push_back(target);
                }
            }
        }
        Vec::new()
    }

    fn walk_back(&self, start: &str, last: &str, came_from: &BTreeMap<&str, &str>) -> Vec<ImportArrow> {
        let mut cycle: Vec<ImportArrow> = self.arrow(last, start).into_iter().collect();
        let mut file = last;
        while file != start {
            let before = came_from[file];
            cycle.extend(self.arrow(before, file));
            file = before;
        }
        cycle.reverse();
        cycle
    }

    fn add(&mut self, from: &str, to: &str, path: &[String]) {
        if from != to {
            let names = self.arrows.entry(from.to_owned()).or_default().entry(to.to_owned()).or_default();
            names.insert(path.join("::"));
        }
    }
}

/// What a name in a module stands for. A module, a function and a macro may share a name.
#[derive(Clone)]
enum NameMeaning {
    /// A type or a trait that this module's file defines; more may follow behind it in a path.
    Type,
    /// A function, constant or macro that this module's file defines.
    Value,
    /// A child module, by its place in the tree.
    Module(usize),
    /// An exported macro, by the module that defines it.
    ExportedMacro(usize),
    /// An import or a re-export of the path.
    Import(Vec<String>),
}

/// Where a path leads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PathTarget {
    /// An item of the module, or something inside an item.
    ItemOf(usize),
    /// A module itself.
    Module(usize),
}

/// One module of a crate.
struct ModuleNode {
    file: String,
    parent: Option<usize>,
    names: BTreeMap<String, Vec<NameMeaning>>,
    /// Macros that are defined here.
    macros: BTreeSet<String>,
    /// Paths before `::*`.
    globs: Vec<Vec<String>>,
    used: UsedPaths,
}

/// Paths that a module's code uses.
#[derive(Default)]
struct UsedPaths {
    /// Paths of private imports.
    imports: Vec<Vec<String>>,
    /// Paths in code.
    paths: BTreeSet<Vec<String>>,
    /// Names of macros, which are visible in child modules without an import.
    macros: BTreeSet<String>,
    /// Paths in strings of attributes, which may name a module.
    attributes: BTreeSet<Vec<String>>,
}

/// Bound of a followed path. `use name::name` of another crate would lead to itself without end.
const LONGEST_PATH: usize = 16;

/// Modules of a crate; the root comes first.
#[derive(Default)]
struct ModuleTree {
    modules: Vec<ModuleNode>,
}

impl ModuleTree {
    /// Reads a file as a module, and the files of its child modules. Returns the module's place.
    fn read_file(
        &mut self,
        parent: Option<usize>,
        path: &str,
        sources: &BTreeMap<&str, &SourceFile>,
    ) -> Result<usize, RepositoryError> {
        let missing = || RepositoryError::Form { what: path.to_owned(), why: "no such source file".into() };
        let source = sources.get(path).ok_or_else(missing)?;
        let file = syn::parse_file(&source.text)
            .map_err(|error| RepositoryError::Rust { path: path.to_owned(), source: error })?;
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let stem = name.trim_end_matches(".rs");
        let children = if parent.is_none() || stem == "mod" { folder.to_owned() } else { format!("{folder}/{stem}") };
        self.read_module(parent, path, &children, (&file.items, sources))
    }

    fn read_module(
        &mut self,
        parent: Option<usize>,
        file: &str,
        children: &str,
        (items, sources): (&[syn::Item], &BTreeMap<&str, &SourceFile>),
    ) -> Result<usize, RepositoryError> {
        let at = self.modules.len();
        self.modules.push(ModuleNode {
            file: file.to_owned(),
            parent,
            names: BTreeMap::new(),
            macros: BTreeSet::new(),
            globs: Vec::new(),
            used: UsedPaths::default(),
        });
        for item in items.iter().filter(|item| !is_test_only(attributes(item))) {
            if let syn::Item::Mod(module) = item {
                let name = module.ident.to_string();
                let inside = format!("{children}/{name}");
                let child = match &module.content {
                    Some((_, items)) => Some(self.read_module(Some(at), file, &inside, (items, sources))?),
                    None => self.read_child(at, &inside, module, sources)?,
                };
                let meaning = child.map(NameMeaning::Module);
                self.modules[at].names.entry(name).or_default().extend(meaning);
            } else {
                ModuleReader { module: &mut self.modules[at] }.visit_item(item);
                if let Some((name, meaning)) = definition(item) {
                    // An exported macro has its path in the root module.
                    let exported = attributes(item).iter().any(|attribute| attribute.path().is_ident("macro_export"));
                    let (module, meaning) = if exported { (0, NameMeaning::ExportedMacro(at)) } else { (at, meaning) };
                    self.modules[module].names.entry(name).or_default().push(meaning);
                }
            }
        }
        Ok(at)
    }

    fn read_child(
        &mut self,
        parent: usize,
        inside: &str,
        module: &syn::ItemMod,
        sources: &BTreeMap<&str, &SourceFile>,
    ) -> Result<Option<usize>, RepositoryError> {
        let mut files = vec![format!("{inside}.rs"), format!("{inside}/mod.rs")];
        if let Some(path) = path_attribute(&module.attrs) {
            let folder = self.modules[parent].file.rsplit_once('/').map_or("", |(folder, _)| folder);
            files = vec![format!("{folder}/{path}")];
        }
        let file = files.iter().find(|file| sources.contains_key(file.as_str())).unwrap_or(&files[0]);
        match sources.get(file.as_str()) {
            Some(source) if source.is_test() => Ok(None),
            _ => self.read_file(Some(parent), file, sources).map(Some),
        }
    }

    fn add_arrows(&self, at: usize, graph: &mut ImportGraph) {
        let module = &self.modules[at];
        graph.arrows.entry(module.file.clone()).or_default();
        for path in module.used.imports.iter().chain(&module.used.paths) {
            for target in self.resolve(at, path) {
                if let PathTarget::ItemOf(other) = target {
                    graph.add(&module.file, &self.modules[other].file, path);
                }
            }
        }
        for path in &module.used.attributes {
            for target in self.resolve(at, path) {
                let (PathTarget::ItemOf(other) | PathTarget::Module(other)) = target;
                graph.add(&module.file, &self.modules[other].file, path);
            }
        }
        for name in &module.used.macros {
            let path = vec![name.clone()];
            let ancestors = std::iter::successors(module.parent, |other| self.modules[*other].parent);
            let defines = |other: &usize| self.modules[*other].macros.contains(name);
            for other in ancestors.filter(defines).take(1) {
                graph.add(&module.file, &self.modules[other].file, &path);
            }
        }
    }

    /// Targets of a path in a module; none if it leads out of the crate or into a function's variables.
    fn resolve(&self, at: usize, path: &[String]) -> BTreeSet<PathTarget> {
        let mut targets = BTreeSet::new();
        self.follow(at, path, &mut BTreeSet::new(), &mut targets);
        targets
    }

    fn follow(
        &self,
        at: usize,
        path: &[String],
        seen: &mut BTreeSet<(usize, Vec<String>)>,
        targets: &mut BTreeSet<PathTarget>,
    ) {
        if path.len() > LONGEST_PATH || !seen.insert((at, path.to_vec())) {
            return;
        }
        let Some((first, rest)) = path.split_first() else {
            targets.insert(PathTarget::Module(at));
            return;
        };
        match first.as_str() {
            "crate" => self.follow(0, rest, seen, targets),
            "self" => self.follow(at, rest, seen, targets),
            "super" => self.modules[at].parent.into_iter().for_each(|parent| self.follow(parent, rest, seen, targets)),
            name => self.follow_name(at, (name, rest), seen, targets),
        }
    }

    fn follow_name(
        &self,
        at: usize,
        (name, rest): (&str, &[String]),
        seen: &mut BTreeSet<(usize, Vec<String>)>,
        targets: &mut BTreeSet<PathTarget>,
    ) {
        let module = &self.modules[at];
        for meaning in module.names.get(name).into_iter().flatten() {
            match meaning {
                NameMeaning::Value if !rest.is_empty() => {}
                NameMeaning::Type | NameMeaning::Value => {
                    targets.insert(PathTarget::ItemOf(at));
                }
                NameMeaning::ExportedMacro(module) => {
                    targets.insert(PathTarget::ItemOf(*module));
                }
                NameMeaning::Module(child) => self.follow(*child, rest, seen, targets),
                NameMeaning::Import(path) => {
                    let whole: Vec<String> = path.iter().chain(rest).cloned().collect();
                    self.follow(at, &whole, seen, targets);
                }
            }
        }
        if !module.names.contains_key(name) {
            for glob in &module.globs {
                let whole: Vec<String> =
                    glob.iter().cloned().chain([name.to_owned()]).chain(rest.iter().cloned()).collect();
                self.follow(at, &whole, seen, targets);
            }
        }
    }
}

/// Collects names and used paths of one module.
struct ModuleReader<'a> {
    module: &'a mut ModuleNode,
}

impl ModuleReader<'_> {
    fn import(&mut self, prefix: &[String], tree: &syn::UseTree, is_private: bool) {
        let join = |name: &syn::Ident| {
            let name = name.to_string();
            let last = (name != "self").then_some(name);
            prefix.iter().cloned().chain(last).collect::<Vec<String>>()
        };
        let mut add = |name: Option<String>, path: Vec<String>| {
            // `use name;` of another crate would otherwise lead back to itself.
            if let Some(name) = name.filter(|name| path.len() > 1 || path.first() != Some(name)) {
                self.module.names.entry(name).or_default().push(NameMeaning::Import(path.clone()));
            }
            if is_private {
                self.module.used.imports.push(path);
            }
        };
        match tree {
            syn::UseTree::Path(path) => self.import(&join(&path.ident), &path.tree, is_private),
            syn::UseTree::Name(name) => add(join(&name.ident).last().cloned(), join(&name.ident)),
            syn::UseTree::Rename(rename) => add(Some(rename.rename.to_string()), join(&rename.ident)),
            syn::UseTree::Glob(_) => self.module.globs.push(prefix.to_vec()),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.import(prefix, item, is_private)),
        }
    }

    /// Paths in the tokens of a macro or an attribute, which have no syntax tree.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.module.used.paths.insert(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.module.used.paths.insert(std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.module.used.paths.insert(path);
    }

    fn attribute_strings(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.attribute_strings(group.stream()),
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    if let Ok(path) = syn::parse_str::<syn::Path>(text.trim_matches('"')) {
                        self.module.used.attributes.insert(segments(&path));
                    }
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for ModuleReader<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test_only(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test_only(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_test_only(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&[], &item.tree, matches!(item.vis, syn::Visibility::Inherited));
        }
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.module.used.paths.insert(segments(path));
        }
        visit::visit_path(self, path);
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        self.module.macros.extend(item.ident.as_ref().map(ToString::to_string));
        visit::visit_item_macro(self, item);
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        if let Some(name) = invocation.path.get_ident() {
            self.module.used.macros.insert(name.to_string());
        }
        self.tokens(invocation.tokens.clone());
        visit::visit_macro(self, invocation);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
            self.attribute_strings(list.tokens.clone());
        }
    }
}

fn segments(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("path"))?;
    match &attribute.meta.require_name_value().ok()?.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
        _ => None,
    }
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn definition(item: &syn::Item) -> Option<(String, NameMeaning)> {
    let (name, meaning) = match item {
        syn::Item::Enum(item) => (&item.ident, NameMeaning::Type),
        syn::Item::Struct(item) => (&item.ident, NameMeaning::Type),
        syn::Item::Trait(item) => (&item.ident, NameMeaning::Type),
        syn::Item::Type(item) => (&item.ident, NameMeaning::Type),
        syn::Item::Union(item) => (&item.ident, NameMeaning::Type),
        syn::Item::Const(item) => (&item.ident, NameMeaning::Value),
        syn::Item::Fn(item) => (&item.sig.ident, NameMeaning::Value),
        syn::Item::Macro(item) => (item.ident.as_ref()?, NameMeaning::Value),
        syn::Item::Static(item) => (&item.ident, NameMeaning::Value),
        _ => return None,
    };
    Some((name.to_string(), meaning))
}
